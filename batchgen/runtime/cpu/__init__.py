"""What only a CPU needs: packed products, fused modules, native attention, threads."""
