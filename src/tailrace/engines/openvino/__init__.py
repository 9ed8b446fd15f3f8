"""OpenVINO GenAI: the default engine on CPUs. `engine` keeps the promise; the others are its parts."""
