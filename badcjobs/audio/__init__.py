"""Audio files, as far as badcjobs itself looks into them: how long they are, and pieces cut out of them."""
