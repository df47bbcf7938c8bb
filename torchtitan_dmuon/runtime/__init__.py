"""Moves owned weights and gradients between ranks. Data goes one way: plan -> routes -> units -> step -> publish."""
