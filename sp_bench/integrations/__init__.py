"""Plug-ins: this suite's attention in other libraries' models. Each has a file here, which imports that library."""
