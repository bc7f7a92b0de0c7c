"""The seams where SkyRL builds a model and steps its optimizer."""
