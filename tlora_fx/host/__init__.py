"""What the machine and the installation are: variables, folders, files, imports, versions."""
