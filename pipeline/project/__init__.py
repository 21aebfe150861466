"""What a project is: its settings, recipes (which name the folders of tables), weights and tables."""
