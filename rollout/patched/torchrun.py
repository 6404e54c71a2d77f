"""torchrun, whose store listens at the address of `--master-addr` only; runs in place of `-m torch.distributed.run`."""

from torch.distributed.run import main

from rollout.patched.tcp_store import listen_at_the_host_only

if __name__ == "__main__":
    listen_at_the_host_only()
    main()
