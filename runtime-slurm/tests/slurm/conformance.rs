//! Runs the conformance suite of all pod runtimes on a Slurm cluster.

use async_trait::async_trait;
use mayfly_runtime::{ContainerSpec, Runtime, SandboxSpec};
use mayfly_runtime_conformance::{RuntimeFixture, TestProgram, check_all};

use crate::harness::{Harness, cluster_or_skip};

const LINE: &str = "a line of the program";
/// The cores of the test cluster: a job needs one.
const CORES: usize = 4;

#[async_trait]
impl RuntimeFixture for Harness {
    fn runtime(&self) -> &dyn Runtime {
        &self.runtime
    }

    async fn pod(&self, name: &str, program: TestProgram) -> (SandboxSpec, ContainerSpec) {
        let script = match program {
            TestProgram::Waits => {
                format!("trap 'exit 0' TERM; echo {LINE}; while :; do sleep 0.1; done")
            }
            TestProgram::IgnoresStop => {
                format!("trap '' TERM; echo {LINE}; while :; do sleep 0.1; done")
            }
            TestProgram::Exits(code) => format!("echo {LINE}; exit {code}"),
        };
        (Harness::sandbox_spec(name, &[]), self.container(name, &script))
    }

    fn log_line(&self) -> Option<&str> {
        Some(LINE)
    }

    fn has_grace(&self) -> bool {
        true
    }

    /// A job waits in the queue of its partition.
    fn starts_at_once(&self) -> bool {
        false
    }

    /// Slurm measures its jobs.
    fn measures_usage(&self) -> bool {
        false
    }

    /// Jobs run on machines that the pod network does not reach.
    fn has_addresses(&self) -> bool {
        false
    }

    fn pods_at_once(&self) -> usize {
        CORES
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slurm_passes_the_suite_of_runtimes() {
    let Some(cluster) = cluster_or_skip("slurm_passes_the_suite_of_runtimes") else { return };
    let test = Harness::new(&cluster).await;
    check_all(&test).await;
    assert!(cluster.run("squeue", &["--noheader"]).trim().is_empty(), "a job is left");
}
