//! Machines that join: the approval of their certificate requests, against the real API.

use std::sync::Arc;

use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        ByteString,
        api::{certificates::v1::CertificateSigningRequest, core::v1::Node},
        jiff::SignedDuration,
    },
};
use mayfly_apiserver::User;
use mayfly_controllers::{CertificateSigningConfig, NodeApproval};
use mayfly_informer::Informer;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::{Value, json};

use crate::support::{ControllersHarness, until};

const SIGNER: &str = "kubernetes.io/kube-apiserver-client-kubelet";

/// A request of a client certificate, by a machine with a bootstrap token.
async fn request(cluster: &ControllersHarness, node: &str) {
    let mut user = User::in_process("system:bootstrap:abcdef");
    user.groups.push("system:bootstrappers".to_owned());
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(DnType::CommonName, format!("system:node:{node}"));
    let pem = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
    let object = json!({"metadata": {"name": node}, "spec": {"signerName": SIGNER,
        "usages": ["digital signature", "client auth"], "request": ByteString(pem.into_bytes())}});
    let object: CertificateSigningRequest = serde_json::from_value(object).unwrap();
    let api: Api<CertificateSigningRequest> = Api::all(cluster.server.client(user));
    api.create(&PostParams::default(), &object).await.unwrap();
}

/// The types and reasons of a request's conditions, and whether it has a certificate.
fn shown(requests: &Informer<CertificateSigningRequest>, name: &str) -> (Vec<String>, bool) {
    let request = requests.get(&ObjectKey::cluster(name));
    let status = request.and_then(|request| request.status.clone()).unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default().into_iter();
    let conditions = conditions.map(|known| format!("{} {}", known.type_, known.reason.unwrap_or_default()));
    (conditions.collect(), status.certificate.is_some())
}

async fn node(client: &Client, object: Value) {
    let node: Node = serde_json::from_value(object).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &node).await.unwrap();
}

async fn ready(client: &Client, name: &str, status: &str) {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = Patch::Merge(json!({"status": {"conditions": [{"type": "Ready", "status": status}]}}));
    nodes.patch_status(name, &PatchParams::default(), &patch).await.unwrap();
}

#[tokio::test]
async fn a_joining_machine_gets_its_certificate_once_its_name_is_free() {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.node_approval = Some(NodeApproval::default());
    let sign =
        |_: &str, _: &[String], _: SignedDuration| -> Result<String, String> { Ok("certificate".into()) };
    cluster.config.certificate_signing = CertificateSigningConfig { sign: Some(Arc::new(sign)) };
    let requests = cluster.informers.of::<CertificateSigningRequest>();
    node(&cluster.client, json!({"metadata": {"name": "used"}})).await;
    ready(&cluster.client, "used", "True").await;
    cluster.run_controllers();
    request(&cluster, "free").await;
    until(&requests, "it is signed", || shown(&requests, "free").1).await;
    assert_eq!(shown(&requests, "free").0, ["Approved AutoApproved"]);
    request(&cluster, "used").await;
    until(&requests, "it is held", || !shown(&requests, "used").0.is_empty()).await;
    assert_eq!(shown(&requests, "used"), (vec!["NotApproved NodeNameInUse".to_owned()], false));
    ready(&cluster.client, "used", "Unknown").await;
    until(&requests, "it is signed", || shown(&requests, "used").1).await;
    assert_eq!(shown(&requests, "used").0, ["Approved AutoApproved"]);
}
