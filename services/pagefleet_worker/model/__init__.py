"""The project's own decoder: its configs, weights and layers, whole or shared by ranks."""
