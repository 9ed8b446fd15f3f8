"""OpenVINO: the default engine on CPUs. `engine` implements the interface; the other modules are its parts."""
