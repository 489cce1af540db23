"""The inner steps between two rounds: loop, optimizers, devices and worker processes."""
