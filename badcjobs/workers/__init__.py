"""Workers: engine processes on the devices, fed from one queue, with retries, autoscaling and a clean stop."""
