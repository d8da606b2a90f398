"""What a person watches: status, training curves, weights, MLflow."""
