"""The seams where torchtitan builds a model and steps its optimizer."""
