//! Client certificates: requested with kubectl, signed by the server, and used in place of a token.

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use mayfly_e2e::{test_name, wait::until};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::kubectl::{Kubectl, kubectl};

/// A certificate request of a user in PEM, and its key.
fn request(name: &str, group: &str) -> Result<(String, KeyPair)> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.distinguished_name.push(DnType::OrganizationName, group);
    let key = KeyPair::generate()?;
    Ok((params.serialize_request(&key)?.pem()?, key))
}

fn object(name: &str, pem: &str, usages: &[&str]) -> Value {
    json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {
            "request": STANDARD.encode(pem),
            "signerName": "kubernetes.io/kube-apiserver-client",
            "expirationSeconds": 3600,
            "usages": usages,
        },
    })
}

/// Waits for the certificate of a request, and returns it as PEM.
async fn issued(kubectl: &Kubectl, name: &str) -> Result<String> {
    let certificate = until("the certificate is issued", async || {
        let shown = kubectl.run(&["get", "csr", name, "-o", "jsonpath={.status.certificate}"]).await?;
        Ok(Some(shown.stdout).filter(|text| !text.is_empty()))
    })
    .await?;
    Ok(String::from_utf8(STANDARD.decode(certificate)?)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_request_authenticates_its_user() -> Result<()> {
    let Some(kubectl) = kubectl(test_name!()).await? else { return Ok(()) };
    let (pem, key) = request("jane", "devs")?;
    let usages = ["client auth", "digital signature"];
    kubectl.up.cli().apply(&object("jane", &pem, &usages)).await?;
    let shown = kubectl.run(&["get", "csr", "jane"]).await?;
    ensure!(shown.stdout.contains("mayfly-admin") && shown.stdout.contains("Pending"), "{shown:?}");
    let approved = kubectl.run(&["certificate", "approve", "jane"]).await?;
    ensure!(approved.code == Some(0), "{approved:?}");
    let certificate = issued(&kubectl, "jane").await?;
    let shown = kubectl.run(&["get", "csr", "jane"]).await?;
    ensure!(shown.stdout.contains("Approved,Issued"), "{shown:?}");

    let folder = tempfile::tempdir()?;
    let (certificate_file, key_file) = (folder.path().join("jane.crt"), folder.path().join("jane.key"));
    std::fs::write(&certificate_file, &certificate)?;
    std::fs::write(&key_file, key.serialize_pem())?;
    let authority = kubectl.up.data().join("pki/ca.crt");
    let server = format!("https://{}", kubectl.up.address("api"));
    let as_jane = async |arguments: &[&str]| -> Result<(bool, String)> {
        let output = Command::new("kubectl")
            .env("HOME", folder.path())
            .env("KUBECONFIG", "/dev/null")
            .args(["--server", &server])
            .arg("--certificate-authority")
            .arg(&authority)
            .arg("--client-certificate")
            .arg(&certificate_file)
            .arg("--client-key")
            .arg(&key_file)
            .args(arguments)
            .output()
            .await?;
        let text = [output.stdout, output.stderr].concat();
        Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
    };
    let (_, shown) = as_jane(&["auth", "whoami", "-o", "json"]).await?;
    let whoami: Value = serde_json::from_str(&shown).with_context(|| shown.clone())?;
    let user = &whoami["status"]["userInfo"];
    ensure!(
        user["username"] == "jane" && user["groups"] == json!(["devs", "system:authenticated"]),
        "{user}"
    );
    let (allowed, shown) = as_jane(&["get", "configmaps"]).await?;
    ensure!(!allowed && shown.contains("User \"jane\" cannot list resource"), "{shown}");
    let bound = kubectl.run(&["create", "rolebinding", "devs", "--clusterrole=view", "--group=devs"]).await?;
    ensure!(bound.code == Some(0), "{bound:?}");
    let (allowed, shown) = as_jane(&["get", "configmaps"]).await?;
    ensure!(allowed && shown.contains("kube-root-ca.crt"), "{shown}");

    // A certificate of another authority authenticates no user.
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "jane");
    std::fs::write(&certificate_file, params.self_signed(&key)?.pem())?;
    let (allowed, shown) = as_jane(&["get", "configmaps"]).await?;
    ensure!(!allowed && shown.contains("must be logged in to the server"), "{shown}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_must_not_be_signed_are_refused() -> Result<()> {
    let Some(kubectl) = kubectl(test_name!()).await? else { return Ok(()) };
    let (pem, _) = request("eve", "system:masters")?;
    let api = kubectl.up.api()?;
    const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    let refused = api.post(REQUESTS, &object("masters", &pem, &["client auth"])).await?;
    let message = refused.body["message"].as_str().unwrap_or_default();
    ensure!(refused.status == 403 && message.contains("system:masters group is not allowed"), "{refused:?}");

    // This signer rejects server usages.
    let (pem, _) = request("jane", "devs")?;
    let created = api.post(REQUESTS, &object("server", &pem, &["server auth"])).await?;
    ensure!(created.status == 201, "{created:?}");
    kubectl.run(&["certificate", "approve", "server"]).await?;
    until("the request failed", async || {
        let shown = kubectl.run(&["get", "csr", "server"]).await?;
        Ok(shown.stdout.contains("Approved,Failed").then_some(()))
    })
    .await?;
    // A denied request is not signed.
    let created = api.post(REQUESTS, &object("denied", &pem, &["client auth"])).await?;
    ensure!(created.status == 201, "{created:?}");
    let denied = kubectl.run(&["certificate", "deny", "denied"]).await?;
    ensure!(denied.code == Some(0), "{denied:?}");
    let shown = kubectl.run(&["get", "csr", "denied"]).await?;
    ensure!(shown.stdout.contains("Denied") && !shown.stdout.contains("Issued"), "{shown:?}");
    Ok(())
}
