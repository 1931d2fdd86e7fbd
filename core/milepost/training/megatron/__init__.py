"""The Megatron trainer: Megatron-core's models, optimizer and pipeline schedules behind milepost's trainer contract.

It needs the extra `milepost[megatron]`. On a CPU it runs on gloo, with the help of `milepost.training.megatron.cpu`.
"""
