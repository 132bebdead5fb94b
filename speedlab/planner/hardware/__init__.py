"""Describe the hardware of a plan: devices, hosts, links and disks."""
