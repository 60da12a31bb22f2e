//! Runs the conformance suite of all pod runtimes on containerd.

use async_trait::async_trait;
use mayfly_runtime::{ContainerSpec, Runtime, SandboxSpec};
use mayfly_runtime_conformance::{RuntimeFixture, TestProgram, check_all};

use crate::{ContainerdFixture, fixture};

const LINE: &str = "a line of the program";

#[async_trait]
impl RuntimeFixture for ContainerdFixture {
    fn runtime(&self) -> &dyn Runtime {
        &self.runtime
    }

    async fn pod(&self, name: &str, program: TestProgram) -> (SandboxSpec, ContainerSpec) {
        let script = match program {
            TestProgram::Waits => format!("trap 'exit 0' TERM; echo {LINE}; sleep 1000 & wait"),
            TestProgram::IgnoresStop => format!("trap '' TERM; echo {LINE}; sleep 1000"),
            TestProgram::Exits(code) => format!("echo {LINE}; exit {code}"),
        };
        (self.sandbox(name), self.container(name, &script))
    }

    fn log_line(&self) -> Option<&str> {
        Some(LINE)
    }

    fn has_grace(&self) -> bool {
        true
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn containerd_passes_the_suite_of_runtimes() {
    let fixture = fixture_or_skip!("containerd_passes_the_suite_of_runtimes");
    check_all(&fixture).await;
    fixture.leaves_nothing().await;
}
