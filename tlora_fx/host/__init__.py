"""What the machine and the installation are: durable files, imports, versions."""
