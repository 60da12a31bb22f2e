//! Pods, as the kubelet starts them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use crate::support::{
    text::{command, handler},
    *,
};
use mayfly_api::{Digest, ObjectKey, function::Isolation, wellknown};
use mayfly_runtime::{
    ContainerFiles, ContainerId, ContainerSpec, ContainerState, FunctionHost as _, Mount, PodUid,
    Runtime as _, RuntimeError, SandboxSpec, Usage,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

pub(crate) const ANSWERS: &str = r#"(func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#;

pub(crate) struct Pod<'a> {
    fixture: &'a WasmHostFixture,
    pub(crate) spec: ContainerSpec,
}

impl<'a> Pod<'a> {
    pub(crate) async fn new(
        fixture: &'a WasmHostFixture,
        component: Digest,
        labels: &[(&str, &str)],
    ) -> Self {
        Self::at(Ipv4Addr::LOCALHOST, fixture, component, labels).await
    }

    async fn at(
        address: Ipv4Addr,
        fixture: &'a WasmHostFixture,
        component: Digest,
        labels: &[(&str, &str)],
    ) -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let uid = PodUid(format!("uid-{number}"));
        let labels: BTreeMap<_, _> = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        let sandbox = SandboxSpec {
            uid: uid.clone(),
            pod: ObjectKey::new("default", format!("pod-{number}")),
            labels,
            annotations: BTreeMap::new(),
            address: Some(IpAddr::V4(address)),
            host: Default::default(),
        };
        fixture.host.create_sandbox(sandbox).await.unwrap();
        let id = ContainerId { pod: uid, name: "main".into(), attempt: 0 };
        let spec = ContainerSpec {
            log_path: fixture.layout.container(&id),
            id,
            image: format!("{}{}", wellknown::COMPONENT_IMAGE_PREFIX, component.hex()),
            command: vec![],
            args: vec![],
            env: vec![],
            memory_bytes_max: None,
            cpu_millis_max: None,
            ports: vec![],
            files: None,
            process: Default::default(),
        };
        Self { fixture, spec }
    }

    pub(crate) async fn start(&self) -> Result<(), RuntimeError> {
        self.fixture.host.start_container(self.spec.clone()).await
    }

    fn state(&self) -> ContainerState {
        self.fixture.host.containers(&self.spec.id.pod).pop().expect("a container").1
    }

    /// Exit code, reason and message, when it has ended.
    async fn exit(&self) -> (i32, String, String) {
        let mut changes = self.fixture.host.changes();
        loop {
            if let ContainerState::Exited { exit_code, reason, message, .. } = self.state() {
                return (exit_code, reason, message);
            }
            tokio::time::timeout(Duration::from_secs(10), changes.changed()).await.unwrap().unwrap();
        }
    }

    fn log(&self) -> String {
        self.fixture.logs.flush();
        std::fs::read_to_string(&self.spec.log_path).unwrap_or_default()
    }
}

async fn run(
    fixture: &WasmHostFixture,
    component: Vec<u8>,
    edit: impl FnOnce(&mut ContainerSpec),
) -> (i32, String, String) {
    let component = fixture.upload(component).await;
    let mut pod = Pod::new(fixture, component, &[]).await;
    edit(&mut pod.spec);
    pod.start().await.unwrap();
    pod.exit().await
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_end_with_their_codes() {
    let fixture = WasmHostFixture::new();
    let well = command(r#"(func (export "run") (result i32) (i32.const 0))"#);
    assert_eq!(run(&fixture, well, |_| {}).await, (0, "Completed".into(), String::new()));
    let fails = command(r#"(func (export "run") (result i32) (i32.const 1))"#);
    assert_eq!(run(&fixture, fails, |_| {}).await, (1, "Error".into(), String::new()));
    let exits = r#"(component
        (import "wasi:cli/exit@0.2.0" (instance $exit
          (export "exit-with-code" (func (param "status-code" u8)))))
        (core func $exit (canon lower (func $exit "exit-with-code")))
        (core module $m (import "host" "exit" (func $exit (param i32)))
          (func (export "run") (result i32) (call $exit (i32.const 7)) (i32.const 0)))
        (core instance $i (instantiate $m (with "host" (instance (export "exit" (func $exit))))))
        (func $run (result (result)) (canon lift (core func $i "run")))
        (instance $exported (export "run" (func $run)))
        (export "wasi:cli/run@0.2.0" (instance $exported)))"#;
    let exits = wat::parse_str(exits).unwrap();
    assert_eq!(run(&fixture, exits, |_| {}).await, (7, "Error".into(), String::new()));
    let traps = command(
        r#"(func $inside unreachable) (func (export "run") (result i32) (call $inside) (i32.const 0))"#,
    );
    let (code, reason, message) = run(&fixture, traps, |_| {}).await;
    assert_eq!((code, reason.as_str()), (134, "Error"));
    assert!(message.contains("unreachable") && message.contains("inside"), "{message}");
    let hog = command(
        r#"(memory 1) (func (export "run") (result i32)
            (loop $again (br_if $again (i32.ne (memory.grow (i32.const 16)) (i32.const -1)))) unreachable)"#,
    );
    let (code, reason, _) = run(&fixture, hog, |spec| spec.memory_bytes_max = Some(4 << 20)).await;
    assert_eq!((code, reason.as_str()), (137, "OOMKilled"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_gets_arguments_and_environment() {
    let job = guest!("job");
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(job).await;
    let mut pod = Pod::new(&fixture, component, &[]).await;
    pod.spec.args = vec!["one".into(), "two words".into()];
    pod.spec.env = vec![("EXIT_CODE".into(), "7".into())];
    pod.start().await.unwrap();
    pod.start().await.expect("a repeated start is none");
    assert_eq!(pod.exit().await, (7, "Error".into(), String::new()));
    let log = pod.log();
    for line in
        ["stdout F argument main", "argument two words", "environment EXIT_CODE=7", "stderr F exiting with 7"]
    {
        assert!(log.contains(line), "{line} is missing in {log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_has_its_folders_and_the_end_of_its_output_is_kept() {
    let component = guest!("bad-job");
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(component).await;
    for (args, expected) in [(["exit", "7"], 7), (["panic", ""], 134), (["oom", ""], 137)] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["in", "out/artifacts", "capture"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        std::fs::write(at("stdin"), "{}").unwrap();
        let mount = |name: &str, read_only| Mount {
            host: at(name),
            guest: format!("/mayfly/{name}"),
            read_only,
            ..Mount::default()
        };
        let mut pod = Pod::new(&fixture, component, &[]).await;
        pod.spec.args = args.map(str::to_owned).to_vec();
        pod.spec.memory_bytes_max = Some(16 << 20);
        pod.spec.files = Some(ContainerFiles {
            mounts: vec![mount("in", true), mount("out", false)],
            stdin: at("stdin"),
            capture: at("capture"),
        });
        pod.start().await.unwrap();
        assert_eq!(pod.exit().await.0, expected);
        let read = |name: &str| std::fs::read_to_string(at(name)).unwrap();
        assert_eq!((read("out/progress").as_str(), read("out/artifacts/notes.txt").len()), ("half", 21));
        assert_eq!(read("capture/stdout"), format!("about to {} {}\n", args[0], args[1]));
        assert!(read("capture/stderr").starts_with("it will not end well\n"));
        assert!(!at("capture/stdout.truncated").exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_program_is_stopped_without_grace_period() {
    let fixture = WasmHostFixture::new();
    let component = fixture
        .upload(command(r#"(func (export "run") (result i32) (loop $l (br $l)) (i32.const 0))"#))
        .await;
    let pod = Pod::new(&fixture, component, &[]).await;
    pod.start().await.unwrap();
    assert!(matches!(pod.state(), ContainerState::Running { .. }));
    let started = std::time::Instant::now();
    fixture.host.stop_container(&pod.spec.id, Duration::from_secs(30)).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let (code, _, message) = pod.exit().await;
    assert_eq!(code, 137);
    assert!(message.contains("cannot receive a stop signal"), "{message}");
    fixture.host.stop_container(&pod.spec.id, Duration::ZERO).await.expect("stopping twice is well");
    fixture.host.remove_sandbox(&pod.spec.id.pod).await.unwrap();
    assert!(fixture.host.sandboxes().is_empty());
    assert!(matches!(pod.start().await, Err(RuntimeError::NoSandbox(_))));
    eventually("its slot is free", || metric(&fixture.metrics(), "mayfly_wasm_instances ") == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_takes_the_slot_of_an_idle_instance() {
    let fixture = WasmHostFixture::with(mayfly_runtime_wasm::Config { instances_max: Some(1), ..small() });
    let mut reuse = spec("reuse", fixture.upload(handler(ANSWERS)).await);
    reuse.isolation = Isolation::Reuse;
    ask(&fixture.host.prepare(reuse), "/").await;
    fixture.settled().await;
    assert_eq!(fixture.instances(), 1.0, "the only slot is an idle instance's");
    let well = command(r#"(func (export "run") (result i32) (i32.const 0))"#);
    assert_eq!(run(&fixture, well, |_| {}).await, (0, "Completed".into(), String::new()));
}

/// A serving pod at an address of its own: after the test releases the port for the pod, no other process can take it,
/// or answer there later.
pub(crate) async fn serving(fixture: &WasmHostFixture, component: Vec<u8>) -> (Pod<'_>, SocketAddr) {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let of_process = (std::process::id() & 0x3fff) << 3;
    let own = of_process | NEXT.fetch_add(1, std::sync::atomic::Ordering::SeqCst) & 7;
    let address = Ipv4Addr::from(0x7f40_0000 | own);
    let component = fixture.upload(component).await;
    let mut pod = Pod::at(address, fixture, component, &[]).await;
    let free = std::net::TcpListener::bind((address, 0)).unwrap().local_addr().unwrap();
    pod.spec.ports = vec![free.port()];
    pod.start().await.unwrap();
    (pod, free)
}

/// An open connection on which one response was received.
pub(crate) async fn served(mut stream: TcpStream) -> TcpStream {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = [0; 15];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_that_answers_serves_http_on_the_pods_address() {
    let fixture = WasmHostFixture::new();
    let (pod, address) = serving(&fixture, handler(ANSWERS)).await;
    let _open = served(TcpStream::connect(address).await.unwrap()).await;
    fixture.host.stop_container(&pod.spec.id, Duration::from_secs(5)).await.unwrap();
    assert_eq!(pod.exit().await, (0, "Completed".into(), String::new()));
    TcpStream::connect(address).await.expect_err("nobody listens any more");
}

/// The request body exceeds the socket buffers, and the client reads only after it has sent all of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_pods_response_arrives_when_the_request_body_is_unread() {
    const UPLOAD_BYTES: usize = 16 << 20;
    let fixture = WasmHostFixture::new();
    let (pod, address) = serving(&fixture, handler(ANSWERS)).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {UPLOAD_BYTES}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![0; UPLOAD_BYTES]).await.expect("all of it is taken");
    let mut answer = [0; 15];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    fixture.host.stop_container(&pod.spec.id, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_at_its_connection_limit_can_be_stopped() {
    let config = mayfly_runtime_wasm::Config { pod_connections_max: 1, ..small() };
    let fixture = WasmHostFixture::with(config);
    let (pod, address) = serving(&fixture, handler(ANSWERS)).await;
    let _open = served(TcpStream::connect(address).await.unwrap()).await;
    fixture.host.stop_container(&pod.spec.id, Duration::from_secs(5)).await.unwrap();
    assert_eq!(pod.exit().await, (0, "Completed".into(), String::new()));
}

/// The guests of a pod end with it, before or after their answer.
#[tokio::test(flavor = "multi_thread")]
async fn guests_of_a_pod_end_with_the_pod() {
    let fixture = WasmHostFixture::new();
    let answering = r#"(func (export "handle") (param i32 i32) (loop $again (br $again)))"#;
    let working_on = r#"(func (export "handle") (param i32 i32)
        (call $answer (local.get 1)) (loop $again (br $again)))"#;
    for module in [answering, working_on] {
        let (pod, address) = serving(&fixture, handler(module)).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        eventually("its guest works", || fixture.instances() == 1.0).await;
        if module == working_on {
            stream.read_exact(&mut [0; 15]).await.unwrap();
        }
        fixture.host.stop_container(&pod.spec.id, Duration::ZERO).await.unwrap();
        eventually("nothing is left of it", || fixture.instances() == 0.0).await;
        fixture.host.remove_sandbox(&pod.spec.id.pod).await.unwrap();
    }
}

/// A client that does not read its response is disconnected.
#[tokio::test(flavor = "multi_thread")]
async fn connections_of_stalled_clients_are_closed() {
    let component = guest!("flood");
    let config = mayfly_runtime_wasm::Config {
        pod_connections_max: 1,
        pod_stall_timeout: Duration::from_secs(1),
        ..small()
    };
    let fixture = WasmHostFixture::with(config);
    let (pod, address) = serving(&fixture, component).await;
    let mut deaf = TcpStream::connect(address).await.unwrap();
    deaf.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    deaf.readable().await.unwrap();
    let mut next = TcpStream::connect(address).await.unwrap();
    next.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let heard = tokio::time::timeout(Duration::from_secs(10), next.read_exact(&mut [0; 15])).await;
    heard.expect("the place was not given back").unwrap();
    fixture.host.stop_container(&pod.spec.id, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_keep_their_revision_loaded() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    let function = fixture.host.prepare(spec("f", component));
    let labels = [(wellknown::LABEL_REVISION, "f-00001")];
    let (one, two) =
        (Pod::new(&fixture, component, &labels).await, Pod::new(&fixture, component, &labels).await);
    one.start().await.unwrap();
    assert!(function.is_loaded(), "running means that it can answer");
    two.start().await.unwrap();
    assert!(matches!(two.state(), ContainerState::Running { .. }));
    fixture.host.stop_container(&one.spec.id, Duration::from_secs(1)).await.unwrap();
    assert_eq!(one.exit().await.0, 0);
    fixture.host.remove_sandbox(&one.spec.id.pod).await.unwrap();
    assert!(function.is_loaded(), "another replica is left");
    fixture.host.remove_sandbox(&two.spec.id.pod).await.unwrap();
    assert!(!function.is_loaded());
    assert_eq!(metric(&fixture.metrics(), "mayfly_wasm_components_loaded "), 0.0);
    // A revision that the gateway has not prepared yet is loaded as well.
    let unknown = Pod::new(&fixture, component, &[(wellknown::LABEL_REVISION, "g-00001")]).await;
    unknown.start().await.unwrap();
    assert_eq!(metric(&fixture.metrics(), "mayfly_wasm_components_loaded "), 1.0);
}

const PAGE: u64 = 64 << 10;

#[tokio::test(flavor = "multi_thread")]
async fn running_containers_report_their_usage() {
    let fixture = WasmHostFixture::new();
    assert_eq!(fixture.host.usage(), []);
    let spins = r#"(memory 3) (func (export "run") (result i32) (loop $l (br $l)) (i32.const 0))"#;
    let spins = fixture.upload(command(spins)).await;
    let program = Pod::new(&fixture, spins, &[]).await;
    program.start().await.unwrap();
    let of = |pod: &Pod| fixture.host.usage().into_iter().find(|(id, _)| *id == pod.spec.id).map(|of| of.1);
    eventually("its time is counted", || {
        of(&program).is_some_and(|usage| usage.cpu > Some(Duration::from_millis(20)))
    })
    .await;
    assert_eq!(of(&program).unwrap().memory_bytes, 3 * PAGE);
    fixture.host.stop_container(&program.spec.id, Duration::ZERO).await.unwrap();
    assert_eq!(of(&program), None, "what has ended uses nothing");

    // Replicas of a revision share its instances.
    let component = fixture.upload(handler(ANSWERS)).await;
    let mut reuse = spec("f", component);
    reuse.isolation = Isolation::Reuse;
    let function = fixture.host.prepare(reuse);
    let labels = [(wellknown::LABEL_REVISION, "f-00001")];
    let (one, two) =
        (Pod::new(&fixture, component, &labels).await, Pod::new(&fixture, component, &labels).await);
    one.start().await.unwrap();
    two.start().await.unwrap();
    let part = |memory_bytes| Some(Usage { memory_bytes, cpu: None });
    assert_eq!((of(&one), of(&two)), (part(0), part(0)), "none has been asked");
    ask(&function, "/").await;
    fixture.settled().await;
    assert_eq!((of(&one), of(&two)), (part(PAGE / 2), part(PAGE / 2)), "the idle instance");
    fixture.host.remove_sandbox(&two.spec.id.pod).await.unwrap();
    assert_eq!((of(&one), of(&two)), (part(PAGE), None));
    fixture.host.forget(&ObjectKey::new("default", "f-00001"));
    drop(function);
    eventually("its instance is gone", || of(&one) == part(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_starts_report_the_reason() {
    let fixture = WasmHostFixture::new();
    let missing = Pod::new(&fixture, Digest::of(b"nothing"), &[]).await;
    let error = missing.start().await.unwrap_err();
    let told = matches!(&error, RuntimeError::ImageMissing(why) if why.contains("mayfly artifact push"));
    assert!(told, "{error}");
    let mut image = Pod::new(&fixture, Digest::of(b"nothing"), &[]).await;
    image.spec.image = "docker.io/library/nginx".into();
    let error = image.start().await.unwrap_err();
    assert!(matches!(&error, RuntimeError::ImageName(why) if why.contains("nginx")), "{error}");
    let module = fixture.upload(wat::parse_str("(module)").unwrap()).await;
    let error = Pod::new(&fixture, module, &[]).await.start().await.unwrap_err();
    assert!(matches!(&error, RuntimeError::Invalid(why) if why.contains("core module")), "{error}");
}
