"""Other Python packages in the environment of tailrace: plugins, commands that install packages, and telemetry."""
