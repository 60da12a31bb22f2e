//! Runs the conformance suite on the simulated runtime.

use async_trait::async_trait;
use mayfly_api::ObjectKey;
use mayfly_runtime::{
    ContainerId, ContainerSpec, PodUid, Runtime, SandboxSpec,
    simulated::{ANNOTATION_EXIT_CODE, SimulatedRuntime},
};
use mayfly_runtime_conformance::{RuntimeFixture, TestProgram, check_all};

struct SimulatedFixture(SimulatedRuntime);

#[async_trait]
impl RuntimeFixture for SimulatedFixture {
    fn runtime(&self) -> &dyn Runtime {
        &self.0
    }

    async fn pod(&self, name: &str, program: TestProgram) -> (SandboxSpec, ContainerSpec) {
        let uid = PodUid(name.into());
        let exits = match program {
            TestProgram::Exits(code) => Some((ANNOTATION_EXIT_CODE.to_owned(), code.to_string())),
            TestProgram::Waits | TestProgram::IgnoresStop => None,
        };
        let sandbox = SandboxSpec {
            uid: uid.clone(),
            pod: ObjectKey::new("default", name),
            labels: Default::default(),
            annotations: exits.into_iter().collect(),
            address: Some("127.0.0.9".parse().unwrap()),
            host: Default::default(),
        };
        let container = ContainerSpec {
            id: ContainerId { pod: uid, name: "main".into(), attempt: 0 },
            image: "any".into(),
            command: vec![],
            args: vec![],
            env: vec![],
            memory_bytes_max: None,
            cpu_millis_max: None,
            ports: vec![],
            log_path: "/nonexistent".into(),
            files: None,
            process: Default::default(),
        };
        (sandbox, container)
    }

    fn log_line(&self) -> Option<&str> {
        None
    }

    fn has_grace(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn the_simulated_runtime_passes_the_suite() {
    check_all(&SimulatedFixture(SimulatedRuntime::new("simulated"))).await;
}
