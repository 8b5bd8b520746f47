"""ddtree_jax: Kimi K2.6 in JAX, decoded with DDTree speculation."""
