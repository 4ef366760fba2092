"""The mathematics of block diffusion: noise, objective, sampling, policies, the plain loop."""
