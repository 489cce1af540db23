"""The inner steps between two rounds: model, optimizer, devices, and which samples a member may use."""
