//! Runs the conformance suite of all pod runtimes on this host.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::atomic::{AtomicU8, Ordering},
};

use async_trait::async_trait;
use mayfly_api::{Digest, ObjectKey, wellknown};
use mayfly_runtime::{ContainerId, ContainerSpec, PodUid, Runtime, SandboxSpec};
use mayfly_runtime_conformance::{RuntimeFixture, TestProgram, check_all};

use crate::support::{
    text::{command, handler},
    *,
};

/// The argument that the test program writes to its stdout.
const ARGUMENT: &str = "two words";

struct WasmFixture {
    fixture: WasmHostFixture,
    waits: Digest,
    ignores_stop: Digest,
    /// A program that writes its arguments and exits with the code from its environment.
    exits: Digest,
    pods: AtomicU8,
}

impl WasmFixture {
    /// Functions listen on their pods' addresses, so each pod has its own.
    fn next_address(&self) -> IpAddr {
        let number = self.pods.fetch_add(1, Ordering::Relaxed);
        Ipv4Addr::new(127, 77, 0, number + 1).into()
    }
}

#[async_trait]
impl RuntimeFixture for WasmFixture {
    fn runtime(&self) -> &dyn Runtime {
        &self.fixture.host
    }

    async fn pod(&self, name: &str, program: TestProgram) -> (SandboxSpec, ContainerSpec) {
        let uid = PodUid(name.into());
        let sandbox = SandboxSpec {
            uid: uid.clone(),
            pod: ObjectKey::new("default", name),
            labels: Default::default(),
            annotations: Default::default(),
            address: Some(self.next_address()),
            host: Default::default(),
        };
        let component = match program {
            TestProgram::Waits => self.waits,
            TestProgram::IgnoresStop => self.ignores_stop,
            TestProgram::Exits(_) => self.exits,
        };
        let (args, env) = match program {
            TestProgram::Exits(code) => {
                (vec![ARGUMENT.to_owned()], vec![("EXIT_CODE".to_owned(), code.to_string())])
            }
            TestProgram::Waits | TestProgram::IgnoresStop => (vec![], vec![]),
        };
        let id = ContainerId { pod: uid, name: "main".into(), attempt: 0 };
        let container = ContainerSpec {
            log_path: self.fixture.layout.container(&id),
            id,
            image: format!("{}{}", wellknown::COMPONENT_IMAGE_PREFIX, component.hex()),
            command: vec![],
            args,
            env,
            memory_bytes_max: None,
            cpu_millis_max: None,
            ports: vec![],
            files: None,
            process: Default::default(),
        };
        (sandbox, container)
    }

    fn log_line(&self) -> Option<&str> {
        Some("argument two words")
    }

    /// A command does not receive the stop request: it ends at once.
    fn has_grace(&self) -> bool {
        false
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wasm_host_passes_the_suite_of_runtimes() {
    let exits = guest!("job");
    let fixture = WasmHostFixture::new();
    let waits = handler(r#"(func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#);
    let waits = fixture.upload(waits).await;
    let spins = command(r#"(func (export "run") (result i32) (loop $again (br $again)) (i32.const 0))"#);
    let ignores_stop = fixture.upload(spins).await;
    let exits = fixture.upload(exits).await;
    check_all(&WasmFixture { fixture, waits, ignores_stop, exits, pods: AtomicU8::new(0) }).await;
}
