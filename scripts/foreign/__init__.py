"""Public models and training steps, brought to the form that is measured: glue only, one file for each family."""
