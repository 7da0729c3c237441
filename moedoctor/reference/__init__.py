"""Plain torch in float32: what every implementation is compared with."""
