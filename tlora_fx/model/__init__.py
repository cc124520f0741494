"""The Shared Super-Model as a module: its code, its weights, its adapters, its batches."""
