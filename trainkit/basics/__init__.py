"""What all of trainkit uses: settings, devices, random streams, texts, files."""
