"""What a rank runs, one module an experiment. `utils.launch` starts them."""
