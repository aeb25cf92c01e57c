"""Other packages' functions by their own names and rules, computed by cuflash: one module a peer. They need PyTorch."""
