"""What the commands share: flags, loading of models, errors of one line."""
