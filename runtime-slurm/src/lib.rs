//! The Slurm host: containers of pods as batch jobs of a Slurm cluster.
//!
//! **Belongs here:** the batch script and the options of `sbatch` for a container ([`script`]); the parsers of the
//! output of Slurm's commands, and its meaning for a container ([`output`], [`state`]), all three pure; running the
//! commands ([`commands`]); the records of submitted jobs on disk ([`record`]); a [`mayfly_runtime::Runtime`] over
//! these ([`SlurmRuntime`]), which polls all jobs together and copies their output into the containers' logs; the
//! devices of the virtual node that represents the cluster ([`SlurmDevices`]).
//!
//! **Does not belong here:** restarts of pods and the staging of inputs and outputs (the kubelet), the choice of the
//! node (the scheduler), the choice of a machine of the cluster (Slurm).
//!
//! Each container is a batch job of its own. A container's directory is in a directory that this machine and the
//! machines of the cluster share:
//!
//! ```text
//! DIR/pods/<pod uid>/pod.json                     the pod's name and annotations
//! DIR/pods/<pod uid>/<container>_<attempt>/
//!     record.json                                 the job's id, start and end, as far as they are known
//!     script                                      the batch script; only its owner may read it
//!     claim                                       written by the script: the id of the job that runs the program
//!     exit                                        written by the script: the program's exit code
//!     stdout, stderr                              written by Slurm
//!     log-offsets                                 the number of bytes of both in the container's log
//! ```
//!
//! No container runs twice: the record is durable before `sbatch` is called; after a call with an unknown result the
//! job is searched by its name, which is unique to the container, before it is submitted again; and a second job of the
//! same name, submitted by a late `sbatch`, ends without running the program, because the claim belongs to the other
//! job.
//!
//! Start reading at [`SlurmRuntime`], then `runtime/poll.rs`.

#![warn(missing_debug_implementations)]

pub mod commands;
mod devices;
mod log_copy;
pub mod output;
pub mod record;
mod runtime;
pub mod script;
pub mod state;

pub use devices::SlurmDevices;
pub use runtime::{SlurmConfig, SlurmRuntime};
