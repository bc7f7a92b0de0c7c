"""The seams where verl builds a model and steps its optimizer."""
