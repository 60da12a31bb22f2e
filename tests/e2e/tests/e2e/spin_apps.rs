//! Spin applications: `mayfly deploy spin.toml`.

use std::{net::SocketAddr, path::Path, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use http::Method;
use mayfly_e2e::{CompleteResponse, Up, digest_of, full, guest_or_skip, wait::until};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

const HOST: &str = "shop.default.fn.localhost";

/// The manifest of the example, with other sources and another name.
fn manifest(component: &Path) -> Result<String> {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/storefront/spin.toml");
    let text = std::fs::read_to_string(example)?;
    ensure!(text.contains("target/mayfly/storefront.wasm"), "{text}");
    let text = text.replace("target/mayfly/storefront.wasm", &component.to_string_lossy());
    Ok(text.replace("name = \"storefront\"", "name = \"shop\""))
}

/// A folder with the application.
fn folder(component: &Path) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    std::fs::create_dir_all(folder.path().join("assets/deep"))?;
    std::fs::write(folder.path().join("assets/index.html"), "<h1>Shop</h1>\n")?;
    std::fs::write(folder.path().join("assets/deep/ü.txt"), "unicode\n")?;
    std::fs::write(folder.path().join("spin.toml"), manifest(component)?)?;
    Ok(folder)
}

async fn ask(up: &Up, path: &str) -> Result<CompleteResponse> {
    let http = up.http();
    // Headers of a client about its route are ignored.
    let request =
        http.request(Method::GET, path).header("host", HOST).header("spin-path-info", "/etc/passwd");
    http.call(request, full("")).await
}

/// Answers every request with these bytes.
async fn file_server(content: Vec<u8>) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let Ok(byte) = stream.read_u8().await else { break };
                head.push(byte);
            }
            let answer = match head.starts_with(b"GET /moved") {
                true => {
                    b"HTTP/1.1 302 Found\r\nlocation: /file\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                        .to_vec()
                }
                false => {
                    let head = format!(
                        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                        content.len()
                    );
                    [head.as_bytes(), &content].concat()
                }
            };
            if stream.write_all(&answer).await.is_err() {
                break;
            }
        }
    });
    Ok(address)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_application_is_deployed_called_and_changed() -> Result<()> {
    let component = guest_or_skip!("storefront");
    let up = Up::start().await?;
    let folder = folder(&component)?;
    let path = folder.path().to_string_lossy().into_owned();
    let said = up.cli().fails(&["deploy", &path]).await?;
    ensure!(said.contains("--variable token=VALUE"), "{said}");
    let told =
        up.cli().ok(&["deploy", &path, "--variable", "token=t0p$(HOME)", "--wait-timeout", "100s"]).await?;
    ensure!(told.contains(&format!("http://{HOST}:")) && told.contains("shop-stock (private)"), "{told}");

    let answer = until("the routes are there", || async {
        let answer = ask(&up, "/hello?x=1").await?;
        Ok((answer.status == 200).then_some(answer))
    })
    .await?;
    let body = answer.json()?;
    for (field, expected) in [
        ("greeting", "hello, Ada"),
        ("token", "t0p$(HOME)"),
        ("mode", "fast"),
        ("route", "/hello"),
        ("url", "http://shop.default.fn.localhost/hello?x=1"),
    ] {
        ensure!(body[field] == expected, "{field}: {body}");
    }
    ensure!(body["none"].as_str().is_some_and(|text| text.contains("Undefined")), "{body}");
    ensure!(body["bad name"].as_str().is_some_and(|text| text.contains("InvalidName")), "{body}");
    ensure!(body["written"].is_string(), "a function has no files to write: {body}");
    ensure!(ask(&up, "/hello/").await?.status == 200, "a final slash means nothing");

    // Only files of the application are served.
    for (path, status, text) in [
        ("/static/index.html", 200, "<h1>Shop</h1>\n"),
        ("/static/none.html", 404, ""),
        ("/static/../../etc/passwd", 404, ""),
        ("/other", 404, ""),
    ] {
        let answer = ask(&up, path).await?;
        ensure!(answer.status == status && (text.is_empty() || answer.text() == text), "{path}: {answer:?}");
    }
    // Components have no addresses except the application's routes.
    let answer = up.http().get("/fn/default/shop-greeting/").await?;
    ensure!(answer.status == 404, "{answer:?}");
    let secret = up.cli().get("secret", "shop-variables").await?;
    ensure!(secret["data"]["greeting.token"].is_string(), "{secret}");
    let function = up.cli().get("function", "shop-greeting").await?;
    ensure!(!function.to_string().contains("t0p"), "a secret is in the function: {function}");

    // Another deployment replaces the first: a file changed, a component is gone.
    std::fs::write(folder.path().join("assets/index.html"), "new\n")?;
    let text = manifest(&component)?;
    let stock = text.find("[[trigger.http]]\nroute = { private").context("no private route")?;
    let sources = text.find("[component.greeting]").context("no components")?;
    std::fs::write(folder.path().join("spin.toml"), format!("{}{}", &text[..stock], &text[sources..]))?;
    let told =
        up.cli().run(&["deploy", &path, "--variable", "token=other", "--wait-timeout", "100s"]).await?;
    ensure!(told.code == Some(0) && told.stderr.contains("deleted function shop-stock"), "{told:?}");
    until("the new file is served", || async {
        Ok((ask(&up, "/static/index.html").await?.text() == "new\n").then_some(()))
    })
    .await?;
    until("the new secret is used", || async {
        Ok((ask(&up, "/hello").await?.json()?["token"] == "other").then_some(()))
    })
    .await?;
    let services = up.cli().ok(&["get", "services", "-o", "json"]).await?;
    ensure!(!services.contains("shop-stock"), "{services}");
    Ok(())
}

/// Waits until the application serves this page.
async fn serves(up: &Up, page: &str) -> Result<()> {
    until("the application serves what was saved", || async {
        Ok((ask(up, "/static/index.html").await?.text() == page).then_some(()))
    })
    .await
}

/// `mayfly dev` of an application: a saved file is served; build commands run before each deployment, and their outputs
/// do not trigger another one.
#[tokio::test(flavor = "multi_thread")]
async fn every_save_of_an_application_is_deployed() -> Result<()> {
    let component = guest_or_skip!("storefront");
    let up = Up::start().await?;
    let folder = folder(&component)?;
    let text = manifest(&component)?;
    let command = text.lines().find(|line| line.starts_with("command = ")).context("no build command")?;
    let builds = folder.path().join("builds.txt");
    std::fs::write(
        folder.path().join("spin.toml"),
        text.replace(command, "command = \"echo one >> builds.txt\""),
    )?;
    let mut dev = up.cli().command(&["dev", "spin.toml", "--variable", "token=t"])?;
    let mut dev = dev
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    serves(&up, "<h1>Shop</h1>\n").await?;
    for page in ["second\n", "third\n"] {
        let before = std::fs::read_to_string(&builds)?.lines().count();
        std::fs::write(folder.path().join("assets/index.html"), page)?;
        serves(&up, page).await?;
        let after = std::fs::read_to_string(&builds)?.lines().count();
        // One build for each component.
        ensure!(after == before + 3, "{before} builds became {after} by one save");
    }
    dev.kill().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_is_fetched_by_its_digest() -> Result<()> {
    let component = guest_or_skip!("storefront");
    let up = Up::start().await?;
    let content = std::fs::read(&component)?;
    let digest = digest_of(&content);
    let server = file_server(content).await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("spin.toml");
    let path = file.to_string_lossy().into_owned();
    let deploy = |digest: &str| {
        let source = format!("{{ url = \"http://{server}/moved\", digest = \"{digest}\" }}");
        let text = format!(
            "spin_manifest_version = 2\n[application]\nname = \"shop\"\n[[trigger.http]]\nroute = \"/...\"\n\
             component = \"shop\"\n[component.shop]\nsource = {source}\n"
        );
        std::fs::write(&file, text)
    };
    deploy(&digest_of(b"another file"))?;
    let said = up.cli().fails(&["deploy", &path]).await?;
    ensure!(said.contains("has the digest"), "{said}");
    ensure!(up.cli().fails(&["get", "function", "shop"]).await?.contains("not found"), "nothing was created");
    deploy(&digest)?;
    let told = up.cli().ok(&["deploy", &path, "-o", "json", "--wait-timeout", "100s"]).await?;
    let told: Value = serde_json::from_str(&told)?;
    ensure!(told["routes"][0]["route"] == "/..." && told["ready"] == true, "{told}");
    until("the route is there", || async {
        Ok((ask(&up, "/none.txt").await?.text().starts_with("/none.txt: ")).then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn only_allowed_outbound_hosts_are_reached() -> Result<()> {
    let component = guest_or_skip!("proxy");
    let up = Up::start().await?;
    let [allowed, other] = [file_server(b"allowed".to_vec()).await?, file_server(b"other".to_vec()).await?];
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("spin.toml");
    std::fs::write(
        &file,
        format!(
            "spin_manifest_version = 2\n[application]\nname = \"shop\"\n[[trigger.http]]\nroute = \"/...\"\n\
             component = \"shop\"\n[component.shop]\nsource = \"{}\"\nallowed_outbound_hosts = [\"http://{allowed}\"]\n",
            component.display()
        ),
    )?;
    up.cli().ok(&["deploy", &file.to_string_lossy(), "--wait-timeout", "100s"]).await?;
    let fetched = |address: SocketAddr| {
        let path = format!("/?url=http://{address}/");
        let up = &up;
        async move { ask(up, &path).await }
    };
    until("the listed host is reached", || async {
        let answer = fetched(allowed).await?;
        Ok((answer.status == 200 && answer.text() == "allowed").then_some(()))
    })
    .await?;
    let denied = fetched(other).await?;
    ensure!(denied.status == 502 && denied.text().contains("this destination is denied"), "{denied:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_application_cannot_have_is_named() -> Result<()> {
    let up = Up::start().await?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("spin.toml").to_string_lossy().into_owned();
    std::fs::write(
        &path,
        "spin_manifest_version = 2\n[application]\nname = \"x\"\n[[trigger.redis]]\nchannel = \"c\"\ncomponent = \"a\"\n\
         [[trigger.http]]\nroute = \"/\"\ncomponent = \"a\"\n[component.a]\nsource = \"a.wasm\"\n\
         key_value_stores = [\"default\"]\n",
    )?;
    let said = up.cli().fails(&["deploy", &path]).await?;
    ensure!(said.contains("trigger.redis") && said.contains("component.a.key_value_stores"), "{said}");
    std::fs::write(
        &path,
        "spin_manifest_version = 2\n[application]\nname = \"x\"\n[[trigger.http]]\nroute = \"/\"\ncomponent = \"a\"\n\
         [component.a]\nsource = \"a.wasm\"\n[component.a.build]\ncommand = \"exit 7\"\n",
    )?;
    let said = up.cli().fails(&["deploy", &path]).await?;
    ensure!(said.contains("there is no") && said.contains("--build: exit 7"), "{said}");
    let said = up.cli().fails(&["deploy", &path, "--build"]).await?;
    ensure!(said.contains("build command of component a failed"), "{said}");
    let said = up.cli().fails(&["deploy", "x.wasm", "--host", "h.example"]).await?;
    ensure!(said.contains("for Spin applications"), "{said}");
    Ok(())
}
