"""Several accelerators at one model: ranks that share each layer, and stages that share the layers out."""
