"""What people look at passes and graphs with."""
