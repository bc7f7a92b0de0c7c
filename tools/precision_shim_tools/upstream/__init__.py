"""Read a framework's release in a wheel or a folder, without installing or running it."""
