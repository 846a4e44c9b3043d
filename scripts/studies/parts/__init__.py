"""What studies are made of and what they share: measurements, reports, pictures.."""
