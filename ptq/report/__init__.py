"""What people look at: tables on the screen and pictures in the run folder."""
