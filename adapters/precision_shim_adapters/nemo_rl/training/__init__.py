"""The seams where NeMo-RL builds a model and steps its optimizer."""
