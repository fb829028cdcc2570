"""Real lines of a log for every pattern: (the signal's name, the pattern's needle) -> lines."""

from __future__ import annotations

STAMP = "2026-11-20 15:41:37 - INFO - "
RANKED = STAMP + "finetune.py:1 - [RANK 0] "
ELASTIC = "E1120 15:52:26.888000 687 torch/distributed/elastic/multiprocessing/api.py:1003] "
NCCL = (
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/"
)
SUMMARY = (
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-21_00:35:18\n"
    "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 28182)  (SIGKILL)\n"
    "  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 28182"
)

LINES: dict[tuple[str, str], list[str]] = {
    ("output_dir", "using the output directory: "): [RANKED + "using the output directory: out/1"],
    ("processes", "Num processes: "): [
        "Distributed environment: DistributedType.DEEPSPEED  Backend: nccl\nNum processes: 8"
    ],
    ("liger_attempted", "Attempting to apply liger-kernel"): [
        RANKED + "Attempting to apply liger-kernel. fused_linear_cross_entropy=True"
    ],
    ("liger_applied", "Applying Liger kernels "): [
        "Applying Liger kernels to model instance with model type: qwen2 with kwargs: {'rope': True}"
    ],
    ("liger_unsupported", "Liger kernels"): [
        "There are currently no Liger kernels supported for model type: gpt2.",
        "No Liger kernels will be applied.",
    ],
    ("attention", "Auto-detected attention implementation: "): [
        STAMP + "model_utils.py:93 - Auto-detected attention implementation: flash_2"
    ],
    ("packing", "Using packing/padding-free collation"): [
        RANKED + "Using packing/padding-free collation"
    ],
    ("dataset_missed", "Cache not found"): [
        "Cache not found or invalid, transforming datasets...",
        "Cache not found, transforming datasets...",
    ],
    ("dataset_missed", "dataset_skip_cache is True"): [
        "dataset_skip_cache is True, so we will not load the dataset from cache"
    ],
    ("dataset_saved", " transformed dataset to "): [
        "🚀 Saved transformed dataset to local_dataset_cache/4afd4c7ff8",
        "🚀 Pushed transformed dataset to https://huggingface.co/datasets/x/y",
    ],
    ("dataset_found", "Found cached dataset at "): ["✅ Found cached dataset at cache/4afd4c7ff8"],
    ("reference_hit", "Loading reference logprobs cache from "): [
        STAMP + "dpo_utils.py:439 - Loading reference logprobs cache from ref/1.pt"
    ],
    ("reference_missed", "Caching reference logprobs:   0%|"): [
        "Caching reference logprobs:   0%|          | 0/13 [00:00<?, ?it/s]"
    ],
    ("reference_missed", "Reference logprobs cached, using"): [
        STAMP + "dpo_utils.py:514 - Reference logprobs cached, using 0.00 GiB of RAM."
    ],
    ("reference_missed", "Saving reference logprobs cache to "): [
        STAMP + "dpo_utils.py:517 - Saving reference logprobs cache to ref/1.pt"
    ],
    ("reference_missed", "reference log probs for "): [
        "Computing reference log probs for train dataset:   0%|    | 0/9 [00:00<?, ?it/s]"
    ],
    ("liger_asked", "`use_liger_kernel=True` is deprecated"): [
        "/x/trl/scripts/sft.py:103: FutureWarning: `use_liger_kernel=True` is deprecated and will be "
        "removed in v2.0.0."
    ],
    ("packing", "Packing train dataset"): [
        "Packing train dataset:   0%|          | 0/64 [00:00<?, ? examples/s]",
        "Packing train dataset (num_proc=4): 100%|███| 64/64 [00:00<00:00, 900.1 examples/s]",
    ],
    ("total_steps", "Total optimization steps = "): [RANKED + "  Total optimization steps = 30"],
    ("resumed", "Resumed from checkpoint: "): ["Resumed from checkpoint: out/step_4"],
    ("progress", "[step="): [STAMP + "console_logger.py:84 - [step=3/12,epoch=1,eta=00:00:12]"],
    ("saved", "Model weights saved in "): [
        "[transformers] Model weights saved in out/model.safetensors"
    ],
    (
        "saved",
        "You can find where each parameters has been saved in the index located at",
    ): [
        "in 2 checkpoint shards. You can find where each parameters has been saved in the index "
        "located at out/model.safetensors.index.json."
    ],
    ("saved", "odel saved "): [
        "💾 Model saved to out.",
        "2026-11-20 15:41:37 - INFO - __main__ - Model saved to data/zephyr-7b-sft-qlora",
        "Model saved to: /out/final",
    ],
    ("saved", "odel successfully saved "): ["Model successfully saved to ./outputs/lora-out"],
    ("saving", "Saving model checkpoint to "): [
        "[INFO|trainer.py:3410] 2024-06-02 20:48:34,558 >> Saving model checkpoint to /out/orpo-lora"
    ],
    ("tokenizer_saved", "tokenizer config file saved in "): [
        "[INFO|tokenization_utils_base.py:2513] 2024-06-02 20:48:35,638 >> tokenizer config file saved "
        "in /out/orpo-lora/tokenizer_config.json"
    ],
    ("planned", "Total optimization steps = "): [
        "[INFO|trainer.py:2321] 2024-12-04 06:05:15,244 >>   Total optimization steps = 1,428"
    ],
    ("trainer", "/trainer"): [
        '  File "/x/lib/python3.11/site-packages/transformers/trainer.py", line 1938, in train',
        "/x/site-packages/trl/trainer/dpo_trainer.py:412: UserWarning: max_length is not set",
    ],
    ("trainer_of", "/trl/scripts/"): [
        "subprocess.CalledProcessError: Command '['python', '/x/site-packages/trl/scripts/sft.py']' "
        "returned non-zero exit status 1."
    ],
    ("trainer_of", "Trainer"): [
        "/x/train.py:41: FutureWarning: `tokenizer` is deprecated and will be removed in version 0.16.0 "
        "for `SFTTrainer.__init__`. Use `processing_class` instead.",
        "/x/sft_trainer.py:202: UserWarning: You passed a model_id to the SFTTrainer. This will",
    ],
    ("trainer_of", "llamafactory.train."): [
        "[WARNING|2025-12-24 00:20:09] llamafactory.train.sft.workflow:154 >> Batch generation can be slow."
    ],
    ("labelled", "label_ids:"): ["label_ids:"],
    ("factory", ".hparams.parser"): [
        "[INFO|2024-12-04 06:01:59] llamafactory.hparams.parser:355 >> Process rank: 0, device: cuda:0"
    ],
    ("remaining", "Remaining files:"): [
        STAMP + "utils.py:835 - Remaining files:['tokenizer.json', 'tokenizer_config.json', "
        "'model.safetensors', 'config.json']"
    ],
    ("training_completed", "Training completed."): ["✅ Training completed."],
    ("oom", "ut of memory"): [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.25 GiB. GPU 1 has a total "
        "capacity of 79.25 GiB of which 3.19 GiB is free.",
        "RuntimeError: CUDA out of memory",
        "RuntimeError: CUDA error: out of memory",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total",
        "RuntimeError: MPS backend out of memory (MPS allocated: 8.45 GiB, other allocations: 10.73 MiB",
        "[rank3]: Cuda failure 2 'out of memory'",
    ],
    ("oom", "CUBLAS_STATUS_ALLOC_FAILED"): [
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ],
    ("oom_host", "allocate memory"): [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 34359738368 bytes. Error code 12 (Cannot allocate "
        "memory)",
        "OSError: [Errno 12] Cannot allocate memory",
        "/bin/sh: fork: Cannot allocate memory",
    ],
    ("oom_host", "MemoryError"): [
        "MemoryError",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1.16 TiB for an array",
        "pyarrow.lib.ArrowMemoryError: malloc of size 2147483648 failed",
    ],
    ("oom_host", "std::bad_alloc"): [
        "terminate called after throwing an instance of 'std::bad_alloc'"
    ],
    ("oom_host", "oom-kill"): [
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.batch. Some of your processes "
        "may have been killed by the cgroup out-of-memory handler.",
        "[1.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,task=python,pid=12",
    ],
    ("oom_host", "oom_kill event"): [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch. Some of the step tasks have "
        "been OOM Killed."
    ],
    ("oom_host", ": Out Of Memory"): ["srun: error: node07: task 0: Out Of Memory"],
    ("oom_host", "ut of memory: Killed process "): [
        "[12.3] Memory cgroup out of memory: Killed process 2100 (python) total-vm:9kB, anon-rss:8kB",
        "[12.3] Out of memory: Killed process 2100 (python) total-vm:9kB, anon-rss:8kB",
    ],
    ("worker_killed", "is killed by signal: Killed"): [
        "RuntimeError: DataLoader worker (pid 27606) is killed by signal: Killed. "
    ],
    ("shared_memory", "is killed by signal: Bus error"): [
        "RuntimeError: DataLoader worker (pid 27779) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory."
    ],
    ("shared_memory", "Unexpected bus error encountered in worker"): [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm)."
    ],
    ("shared_memory", "unable to write to file </torch_"): [
        "RuntimeError: unable to write to file </torch_12_34_0>: No space left on device (28)"
    ],
    ("child_failed", "failed (exitcode: "): [
        ELASTIC + "failed (exitcode: -9) local_rank: 1 (pid: 688) of binary: /usr/bin/python3",
        "[2024-03-18 17:38:50,208] torch.distributed.elastic.multiprocessing.api: [ERROR] failed "
        "(exitcode: 1) local_rank: 0 (pid: 12) of binary: python",
    ],
    ("child_failed", "exitcode  : "): [SUMMARY],
    ("child_failed", "non-zero exit status"): [
        "subprocess.CalledProcessError: Command '['python', 'x.py']' returned non-zero exit status 1."
    ],
    ("child_failed", " exits with return code = "): [
        "[2024-01-19 10:14:05,903] [ERROR] [launch.py:321:sigkill_handler] ['/x/bin/python', '-u', "
        "'main.py', '--local_rank=0'] exits with return code = -9"
    ],
    ("child_failed", ": Exited with exit code "): [
        "srun: error: gpu-3: task 1: Exited with exit code 1",
        "srun: error: gpu-[3-4]: tasks 0,2-7: Exited with exit code 1",
    ],
    ("child_failed", "command terminated with exit code "): [
        "command terminated with exit code 137"
    ],
    ("child_signal", "died with <Signals"): [
        "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>."
    ],
    ("child_signal", "received by PID"): ["  traceback : Signal 9 (SIGKILL) received by PID 28182"],
    ("stop_asked", "got signal: "): [
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15"
    ],
    ("stop_asked", "Main process received SIG"): [
        "[2025-02-20 20:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGINT, "
        "exiting"
    ],
    ("shell_killed", "Killed"): [
        'k.sh: line 1: 28185 Killed                  python -c "x" --x 1',
        "[1]+  Killed                  nohup python sft.py",
        "srun: error: node-1: task 0: Killed",
        "Killed",
    ],
    ("shell_killed", "Terminated"): ["Terminated"],
    ("shell_killed", "Segmentation fault"): [
        "run.sh: line 1:  7682 Segmentation fault      python sft.py",
        "run.sh: line 1:  7682 Segmentation fault      (core dumped) python sft.py",
    ],
    ("shell_killed", "Aborted"): ["run.sh: line 1:  7682 Aborted                 (core dumped) x"],
    ("shell_killed", "Bus error"): ["run.sh: line 1:  7682 Bus error               python sft.py"],
    ("shell_killed", "Illegal instruction"): ["Illegal instruction (core dumped)"],
    ("shell_killed", "Floating point exception"): ["Floating point exception (core dumped)"],
    ("shell_killed", "Out Of Memory"): ["srun: error: node07: task 0: Out Of Memory"],
    ("shell_killed", "Fatal Python error: "): ["Fatal Python error: Segmentation fault"],
    ("terminated", "terminate called after throwing an instance of "): [
        "terminate called after throwing an instance of 'c10::DistBackendError'"
    ],
    ("watchdog", "watchdog thread terminated with exception: "): [
        "[rank1]:[E1120 16:00:00.000000000 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank "
        "1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=12)",
    ],
    ("what", "what():  "): ["  what():  CUDA error: an illegal memory access was encountered"],
    ("syntax", "Error: "): ["IndentationError: unexpected indent", "SyntaxError: invalid syntax"],
    ("cancelled", "CANCELLED AT"): [
        "slurmstepd-gpu020: error: *** JOB 12 ON gpu020 CANCELLED AT 2024-06-02T18:42:45 DUE TO "
        "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-20T1 DUE TO TIME LIMIT ***",
    ],
    ("cancelled", ": job killed "): [
        "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        "TERM_PREEMPT: job killed after preemption.",
        "TERM_OWNER: job killed by owner.",
    ],
    ("cancelled", "PBS: job killed: "): [
        "=>> PBS: job killed: walltime 259217 exceeded limit 259200",
        "=>> PBS: job killed: mem 67109444kb exceeded limit 67108864kb",
    ],
    ("oom_host", ": job killed"): [
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        "=>> PBS: job killed: vmem 67109444kb exceeded limit 67108864kb",
    ],
    ("oom_host", "node running low on memory"): [
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    ],
    ("stop_asked", " death signal, shutting down workers"): [
        "W1221 17:13:59.240000 46660 torch/distributed/elastic/agent/server/api.py:704] Received 1 death "
        "signal, shutting down workers",
        "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGTERM death signal, shutting "
        "down workers",
    ],
    ("stop_asked", "Run canceled from "): [
        "2026-11-20 15:41:37 host:0 olmo_core.train.trainer:1392 WARNING Run canceled from rank 0. Reason: "
        "SIGTERM received",
        "Run canceled from all ranks. Reason: SIGINT received",
    ],
    ("nccl_timeout", "ProcessGroupNCCL's watchdog got stuck for "): [
        "[rank0]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 0] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got "
        "stuck for 600 seconds without making progress in monitoring enqueued collectives."
    ],
    ("gpu_fault", "uncorrectable ECC error encountered"): [
        "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: cuda runtime error (39) : uncorrectable ECC error encountered at /pytorch/aten/src",
    ],
    ("gpu_fault", "GPU has fallen off the bus"): [
        "[74889.644138] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus."
    ],
    ("device_assert", "device-side assert triggered"): [
        "RuntimeError: CUDA error: device-side assert triggered"
    ],
    ("illegal_access", "an illegal memory access was encountered"): [
        "[rank2]: RuntimeError: CUDA error: an illegal memory access was encountered ",
        "[rank2]: Cuda failure 700 'an illegal memory access was encountered'",
    ],
    ("loss_scale", "Current loss scale already at minimum"): [
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    ],
    ("abi_mismatch", ": undefined symbol: "): [
        "ImportError: /venv/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cud",
        "python: symbol lookup error: /venv/lib/libcusparse.so.12: undefined symbol: __nvJitLinkComplete_12",
        "OSError: /usr/lib/libcublas.so.11: undefined symbol: cublasLtGetStatusString, version libcublasLt",
    ],
    ("corrupt_file", "Error while deserializing header: "): [
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"
    ],
    ("corrupt_file", "PytorchStreamReader failed "): [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "RuntimeError: [enforce fail at inline_container.cc:144] . PytorchStreamReader failed reading zip "
        "archive: failed finding central directory",
    ],
    ("refused", "error: "): [
        "finetune.py: error: argument --x: invalid int value: 'a'",
        "finetune.py: error: unrecognized arguments: --learning_rat",
        "sft.py: error: ambiguous option: --lr could match --lr_a, --lr_b",
        "sft.py: error: the following arguments are required: --model_name_or_path",
        "accelerate <command> [<args>] launch: error: argument --num_processes/--num-processes: "
        "invalid int value: 'x'",
        "accelerate <command> [<args>] launch: error: the following arguments are required: "
        "training_script, training_script_args",
    ],
    ("refused", "are not used by the HfArgumentParser"): [
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--x']",
        "ValueError: Some keys are not used by the HfArgumentParser: ['x']",
    ],
    ("nccl_timeout", "Watchdog caught collective operation timeout"): [
        "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
        "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
    ],
    ("nccl_error", "NCCL error in: "): [
        NCCL
        + "c10d/ProcessGroupNCCL.cpp:1333, unhandled system error (run with NCCL_DEBUG=INFO for "
        "details), NCCL version 2.18.6",
        NCCL + "c10d/ProcessGroupNCCL.cpp:2588, internal error - please report this issue to the "
        "NCCL developers, NCCL version 2.21.5",
        NCCL + "c10d/NCCLUtils.hpp:317, remote process exited or there was a network error, NCCL "
        "version 2.21.5",
    ],
    ("nccl_error", "Bootstrap : no socket interface found"): [
        "[rank0]: Bootstrap : no socket interface found",
        "gpu617:22841:22841 [0] bootstrap.cc:37 NCCL WARN Bootstrap : no socket interface found",
    ],
    ("nccl_timeout", "ms for recv operation to complete"): [
        "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
        "Timed out waiting 20000ms for recv operation to complete",
    ],
    ("nccl_timeout", "ms for send operation to complete"): [
        "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:66] "
        "Timed out waiting 20000ms for send operation to complete",
    ],
    ("rendezvous", "wait timeout after "): [
        "torch.distributed.DistStoreError: wait timeout after 20000ms, keys: /default_pg/0//cpu//0/1"
    ],
    ("rendezvous", " seconds waiting for clients. "): [
        "torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 "
        "clients joined."
    ],
    ("rendezvous", "The client socket has timed out after "): [
        "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while "
        "trying to connect to (127.0.0.1, 29578)."
    ],
    ("violation", "launch: stopped: "): [
        "launch: stopped: loss is nan (step 2, rank 0); last finite: loss 6.92901 at step 1",
        "launch: stopped: nothing moved for 301 s after step 7 (limit 300 s), rank 1; stacks in x",
    ],
    ("warned", "launch: warning: "): [
        "launch: warning: loss is nan (step 2, rank 0); last finite: loss 6.92901 at step 1",
    ],
    ("port_in_use", "Tried to launch distributed communication on port "): [
        "ConnectionError: Tried to launch distributed communication on port `29500`, but another "
        "process is utilizing it. Please specify a different port"
    ],
    ("port_in_use", "ddress already in use"): [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29533, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use",
        "OSError: [Errno 98] Address already in use",
    ],
    ("no_gpu", "no CUDA-capable device is detected"): [
        "RuntimeError: CUDA error: no CUDA-capable device is detected"
    ],
    ("no_gpu", "CUDA error: invalid device ordinal"): [
        "RuntimeError: CUDA error: invalid device ordinal"
    ],
    ("no_gpu", "Found no NVIDIA driver on your system"): [
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA "
        "GPU and installed a driver from http://www.nvidia.com/Download/index.aspx"
    ],
    ("no_gpu", "Torch not compiled with CUDA enabled"): [
        "AssertionError: Torch not compiled with CUDA enabled"
    ],
    ("cuda_driver", "The NVIDIA driver on your system is too old"): [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please "
        "update your GPU driver by downloading and installing a new version from the URL: "
    ],
    ("cuda_driver", "CUDA driver version is insufficient for CUDA runtime version"): [
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version"
    ],
    ("cuda_driver", "no kernel image is available for execution on the device"): [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ],
    ("cuda_driver", "forward compatibility was attempted on non supported HW"): [
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions "
        "before calling NumCudaDevices() that might have already set an error? Error 804: forward "
        "compatibility was attempted on non supported HW"
    ],
    ("cuda_driver", "system has unsupported display driver / cuda driver combination"): [
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported "
        "display driver / cuda driver combination"
    ],
    ("flash_attn_missing", "flash_attn"): [
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the "
        "following error: the package flash_attn seems to be not installed.",
    ],
    ("flash_attn_missing", " doesn't seem to be installed"): [
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the "
        "following error: the package for FlashAttention2 doesn't seem to be installed."
    ],
    ("hub_access", "You are trying to access a gated repo"): [
        "OSError: You are trying to access a gated repo."
    ],
    ("hub_access", "Cannot access gated repo for url "): [
        "Cannot access gated repo for url https://huggingface.co/meta-llama/x/resolve/main/config.json."
    ],
    ("hub_access", " is a gated dataset on the Hub"): [
        "datasets.exceptions.DatasetNotFoundError: Dataset 'a/b' is a gated dataset on the Hub. You "
        "must be authenticated to access it."
    ],
    ("hub_access", "Repository Not Found for url: "): [
        "Repository Not Found for url: https://huggingface.co/api/models/a/b."
    ],
    ("hub_access", "is not a local folder and is not a valid model identifier"): [
        "OSError: a/b is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'"
    ],
    ("hub_access", "doesn't exist on the Hub or cannot be accessed"): [
        "datasets.exceptions.DatasetNotFoundError: Dataset 'a/b' doesn't exist on the Hub or cannot "
        "be accessed."
    ],
    ("hub_access", "401 Client Error"): [
        "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-6;5c)",
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://x",
    ],
    ("hub_access", "Client error '401 Unauthorized'"): [
        "httpx.HTTPStatusError: Client error '401 Unauthorized' for url 'https://huggingface.co/x'"
    ],
    ("hub_access", "403 "): [
        "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/x",
        "huggingface_hub.errors.HfHubHTTPError: 403 Forbidden: Please enable access to public gated "
        "repositories in your fine-grained token settings to view this repository..",
        "huggingface_hub.errors.HfHubHTTPError: Client error '403 Forbidden' for url 'https://x'",
    ],
    ("hub_limit", "429 "): [
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://x",
        "huggingface_hub.errors.HfHubHTTPError: Client error '429 Too Many Requests' for url 'https://x'",
    ],
    ("hub_access", "Make sure your token has the correct permissions"): [
        "Make sure your token has the correct permissions.",
    ],
    ("hub_access", "Token is required "): [
        "huggingface_hub.errors.LocalTokenNotFoundError: Token is required to call the /whoami-v2 "
        "endpoint, but no token found. You must provide a token or be logged in",
        "huggingface_hub.errors.LocalTokenNotFoundError: Token is required (`token=True`), but no "
        "token found. You need to provide a token",
    ],
    ("hub_access", "Invalid user token."): [
        "huggingface_hub.errors.HfHubHTTPError: Invalid user token. The token from HF_TOKEN"
    ],
    ("hub_unreachable", " to load the files, and couldn't find them in the"): [
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
        "find them in the cached files."
    ],
    ("hub_unreachable", "and outgoing traffic has been disabled"): [
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot "
        "folder for the specified revision on the local disk and outgoing traffic has been disabled.",
    ],
    ("hub_unreachable", "Couldn't reach '"): [
        "ConnectionError: Couldn't reach 'nobody/none' on the Hub (LocalEntryNotFoundError)"
    ],
    ("hub_unreachable", "huggingface.co"): [
        "huggingface_hub.errors.HfHubHTTPError: 504 Server Error: Gateway Time-out for url: "
        "https://huggingface.co/api/datasets/x",
        "requests.exceptions.ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', "
        "port=443): Max retries exceeded with url: /api/models/x\"), '(Request ID: 1)')",
    ],
    ("wandb_login", "No API key configured. Use `wandb login`"): [
        "wandb.errors.errors.UsageError: No API key configured. Use `wandb login` to log in."
    ],
    ("wandb_login", "api_key not configured (no-tty)"): [
        "wandb: ERROR api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
        "wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
    ],
    ("wandb_unreachable", "Failed to verify credentials with "): [
        "wandb.errors.errors.AuthenticationError: Failed to verify credentials with "
        "https://api.wandb.ai: Failed to execute API request: the service process is busy",
    ],
    ("wandb_unreachable", "Run initialization has timed out after "): [
        "wandb.errors.CommError: Run initialization has timed out after 90.0 sec. ",
    ],
    ("too_many_files", "Too many open files"): [
        "OSError: [Errno 24] Too many open files: '/dev/null'",
        "RuntimeError: Too many open files. Communication with the workers is no longer possible.",
    ],
    ("disk_full", "No space left on device"): ["OSError: [Errno 28] No space left on device"],
    ("disk_full", "isk quota exceeded"): [
        "OSError: [Errno 122] Disk quota exceeded: 'out/model.safetensors'",
        "safetensors_rust.SafetensorError: Error while serializing: I/O error: Disk quota exceeded "
        "(os error 122)",
    ],
    ("file_limit", "File too large"): [
        "OSError: [Errno 27] File too large",
        "safetensors_rust.SafetensorError: Error while serializing: I/O error: File too large (os "
        "error 27)",
    ],
    ("begun", "nohup: ignoring input"): ["nohup: ignoring input"],
    ("begun", "get_accelerator] Setting "): [
        "[2026-11-20 15:41:37,404] [WARNING] [real_accelerator.py:183:get_accelerator] Setting "
        "accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
        "[2026-11-20 15:41:37,404] [INFO] [real_accelerator.py:260:get_accelerator] Setting "
        "ds_accelerator to cuda (auto detect)",
    ],
    ("begun", " train dataset"): [
        "Tokenizing train dataset:   0%|          | 0/1200 [00:00<?, ? examples/s]",
        "Tokenizing train dataset (num_proc=2):   0%|          | 0/64 [00:00<?, ? examples/s]",
        "Extracting prompt from train dataset:   0%|          | 0/400 [00:00<?, ? examples/s]",
    ],
    ("loading", "Loading "): [
        "Loading weights:   0%|          | 0/38 [00:00<?, ?it/s]",
        "Loading checkpoint shards:   0%|          | 0/4 [00:00<?, ?it/s]",
    ],
    ("bar_begun", "| 0/"): ["  0%|          | 0/12 [00:00<?, ?it/s]"],
    ("not_started", "python"): [
        "/venv/bin/python: can't open file '/work/finetune.py': [Errno 2] No such file or directory",
        "python3.11: No module named accelerate",
    ],
    ("not_found", "not found"): [
        "bash: line 1: acelerate: command not found",
        "/bin/sh: 1: acelerate: not found",
        "zsh: command not found: acelerate",
    ],
}
