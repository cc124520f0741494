"""Facts about the machine and the installation: variables, folders, files, imports, versions."""
