"""The life of one array task; read run_task.py first."""
