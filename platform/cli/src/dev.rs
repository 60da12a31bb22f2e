//! `mayfly dev`: builds and deploys on every save, and follows the logs.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use mayfly_api::duration::Span;
use notify::{EventKind, RecursiveMode, Watcher as _};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};

use super::{
    build, deploy,
    deploy::{Deployed, Settings},
    failure::{self, ErrorCode, Failure},
    format, logs, output,
    server::is_unanswered,
    session::Session,
    spin::{self, AppSources, SpinValues},
};
use crate::guest::{
    limits::{BuildLimits, BuildTimeout},
    project::{BuildSource, Project},
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly dev
  mayfly dev handler.py
  mayfly dev ./hello --env GREETING=hi
  mayfly dev spin.toml --variable token=secret")]
pub(crate) struct DevArgs {
    /// The project: a folder, a script with a handler, or the manifest of a Spin application, whose build commands are
    /// run
    #[arg(default_value = ".", value_name = "DIR|SCRIPT[:HANDLER]|spin.toml")]
    directory: PathBuf,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    spin: SpinValues,
    #[command(flatten)]
    timeout: BuildTimeout,
    /// How long to wait until the function is ready
    #[arg(long, default_value = "60s", value_name = "DURATION")]
    wait_timeout: Span,
}

/// The time without writes after which a build starts: editors save in several steps.
const QUIET: Duration = Duration::from_millis(150);
/// The longest delay of a build while writes continue.
const QUIET_MAX: Duration = Duration::from_secs(2);
/// The pause before a log that ended is requested again.
const LOG_PAUSE: Duration = Duration::from_secs(1);
/// The pause before an unreachable server is contacted again.
const SERVER_PAUSE: Duration = Duration::from_secs(2);

pub(crate) async fn run(args: DevArgs, session: &Session) -> anyhow::Result<()> {
    session.server().await?;
    let manifest = deploy::spin_manifest(&args.directory);
    let watched = match &manifest {
        Some(manifest) => Watched::app(manifest)?,
        None => Watched::project(&args)?,
    };
    // A capacity of one is enough: a change during a pending build is part of that build.
    let (saved, mut saves) = mpsc::channel(1);
    let (folder, is_building) = (watched.folder.clone(), watched.is_building.clone());
    let _watcher = watcher(watched, saved)?;
    output::note(format_args!("watching {}; Ctrl-C ends it", folder.display()));
    let (deployed, known) = watch::channel(None);
    tokio::select! {
        never = rebuild(manifest.as_deref(), &args, session, &deployed, &mut saves, &is_building) => never,
        never = follow(session, known) => never,
        signal = tokio::signal::ctrl_c() => signal.context("cannot hear Ctrl-C")?,
    }
    let deployed = deployed.borrow();
    match deployed.as_ref() {
        Some(LiveFunctions { what, removal, .. }) => {
            output::note(format_args!("\n{what} stays deployed; remove it with: {removal}"));
        }
        None => output::note("\nnothing was deployed"),
    }
    Ok(())
}

/// The functions of the last deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LiveFunctions {
    /// `function hello`, `application shop`.
    what: String,
    namespace: String,
    names: Vec<String>,
    /// The command that removes them.
    removal: String,
}

/// A folder, and the filter for changes below it.
struct Watched {
    folder: PathBuf,
    /// Set for a Spin application.
    app: Option<(PathBuf, AppSources)>,
    /// Whether build commands are running: files that change meanwhile are their products.
    is_building: Arc<AtomicBool>,
}

impl Watched {
    fn project(args: &DevArgs) -> anyhow::Result<Self> {
        if args.spin.is_used() {
            let todo = "leave out --variable and --host, or name a spin.toml";
            return Err(Failure::error(ErrorCode::Usage, "these options are for Spin applications", todo));
        }
        args.settings.check()?;
        let folder = Self::project_folder(&args.directory)?;
        Ok(Self { folder, app: None, is_building: Arc::default() })
    }

    fn app(manifest: &Path) -> anyhow::Result<Self> {
        let sources = spin::app_sources(manifest)?;
        let manifest =
            manifest.canonicalize().with_context(|| format!("cannot read {}", manifest.display()))?;
        let folder = manifest.parent().unwrap_or(Path::new("/")).to_owned();
        Ok(Self { folder, app: Some((manifest, sources)), is_building: Arc::default() })
    }

    fn project_folder(directory: &Path) -> anyhow::Result<PathBuf> {
        let folder = Project::folder(directory)?;
        // Saving a file cannot turn the folder into a project.
        if !folder.join("Cargo.toml").is_file() {
            Project::load(directory)?;
        }
        Ok(folder)
    }

    /// Whether a change of this path requires a deployment. A changed manifest of an application also updates the
    /// application's sources.
    fn is_source(&mut self, path: &Path) -> bool {
        let is_code = is_source(&self.folder, path);
        let Some((manifest, sources)) = &mut self.app else { return is_code };
        if path == manifest {
            // While the manifest is invalid, its former sources apply; the deployment reports the error.
            if let Ok(changed) = spin::app_sources(manifest) {
                *sources = changed;
            }
            return true;
        }
        let is_code = is_code && !self.is_building.load(Ordering::Relaxed);
        path.strip_prefix(&self.folder).is_ok_and(|inner| sources.contain(inner, is_code))
    }
}

/// Builds and deploys, immediately and after every save.
async fn rebuild(
    manifest: Option<&Path>,
    args: &DevArgs,
    session: &Session,
    deployed: &watch::Sender<Option<LiveFunctions>>,
    saves: &mut mpsc::Receiver<()>,
    is_building: &AtomicBool,
) -> ! {
    loop {
        let round = match manifest {
            Some(manifest) => {
                is_building.store(true, Ordering::Relaxed);
                let round = app_round(manifest, args, session).await.map(Some);
                // Changes are reported with a delay.
                sleep(QUIET).await;
                is_building.store(false, Ordering::Relaxed);
                round
            }
            None => project_round(&args.directory, args, session, saves).await,
        };
        match round {
            Ok(None) => {
                output::note("a file has changed: building again");
                settle(saves).await;
                continue;
            }
            Ok(Some(now)) => {
                deployed.send_if_modified(|before| {
                    let is_new = before.as_ref() != Some(&now);
                    *before = Some(now);
                    is_new
                });
            }
            Err(error) => {
                let is_away = is_away(&error);
                output::note(format_args!("error: {}", failure::text(&session.explain(error))));
                if is_away {
                    let pause = format::seconds(SERVER_PAUSE.as_secs_f64());
                    output::note(format_args!("trying again every {pause} until a server answers"));
                    until_it_answers(session).await;
                    continue;
                }
                output::note("waiting for the next save");
            }
        }
        saves.recv().await;
        settle(saves).await;
    }
}

/// Whether the server was unreachable: then the command waits for a server instead of a save.
fn is_away(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(is_unanswered)
}

/// Waits until the server responds to any request.
async fn until_it_answers(session: &Session) {
    loop {
        sleep(SERVER_PAUSE).await;
        let Ok(server) = session.server().await else { continue };
        if !server.get("/version").await.is_err_and(|error| is_unanswered(&error)) {
            return;
        }
    }
}

/// Builds and deploys a Spin application once.
async fn app_round(manifest: &Path, args: &DevArgs, session: &Session) -> anyhow::Result<LiveFunctions> {
    let started = Instant::now();
    let patience = Some(args.wait_timeout.0);
    let app = spin::deploy_app(session, manifest, &args.spin, true, &args.settings, patience).await?;
    let took = format::seconds(started.elapsed().as_secs_f64());
    output::note(format_args!("{}built and deployed in {took}", app.summary()));
    Ok(LiveFunctions {
        what: format!("application {}", app.name),
        removal: app.removal(),
        namespace: app.namespace,
        names: app.functions,
    })
}

/// Builds and deploys a project once; `None` if a save cancelled the build. Contacts the server first, which fails
/// sooner than a build.
async fn project_round(
    directory: &Path,
    args: &DevArgs,
    session: &Session,
    saves: &mut mpsc::Receiver<()>,
) -> anyhow::Result<Option<LiveFunctions>> {
    let started = Instant::now();
    let source = directory.to_owned();
    let Project { manifest, code, .. } = Project::load(directory)?;
    deploy::answers(session, &manifest).await?;
    let limits = BuildLimits::from(args.timeout);
    let _guard = limits.cancel_on_drop();
    let build = {
        let limits = limits.clone();
        tokio::task::spawn_blocking(move || build::project(&source, &limits))
    };
    let built = match code {
        BuildSource::Script(_) => match unless_saved(build, &limits, saves).await? {
            Some(built) => built,
            None => return Ok(None),
        },
        // Its build scripts may write sources, which would cancel every build.
        BuildSource::Cargo => build.await??,
    };
    let built_in = started.elapsed();
    let patience = Some(args.wait_timeout.0);
    let deployed = deploy::deploy(session, &built.into(), &args.settings, patience).await?;
    let seconds = |span: Duration| format::seconds(span.as_secs_f64());
    output::note(format_args!(
        "{} answers at {} (built in {}, deployed in {})",
        deployed.revision.as_deref().unwrap_or(&deployed.name),
        deployed.url,
        seconds(built_in),
        seconds(started.elapsed() - built_in)
    ));
    let Deployed { name, namespace, .. } = deployed;
    let removal = format!("mayfly delete function {name} -n {namespace}");
    Ok(Some(LiveFunctions { what: format!("function {name}"), namespace, names: vec![name], removal }))
}

/// The result of a build; `None` if a save came first, which cancels it.
async fn unless_saved<T>(
    mut build: tokio::task::JoinHandle<anyhow::Result<T>>,
    limits: &BuildLimits,
    saves: &mut mpsc::Receiver<()>,
) -> anyhow::Result<Option<T>> {
    tokio::select! {
        built = &mut build => built?.map(Some),
        Some(()) = saves.recv() => {
            limits.cancel();
            // Two builds at the same time would write the same files. The result is of no interest.
            let _ = build.await;
            Ok(None)
        }
    }
}

/// Prints the logs of the deployed functions, over all revisions, as soon as there are any; restarts when a deployment
/// has other functions.
async fn follow(session: &Session, mut known: watch::Receiver<Option<LiveFunctions>>) -> ! {
    loop {
        let live = known.borrow_and_update().clone();
        let paths = live.iter().flat_map(|live| {
            live.names.iter().map(|name| logs::follow_path(&live.namespace, name)).collect::<Vec<_>>()
        });
        let followed = futures::future::join_all(paths.map(|path| follow_one(session, path)));
        let changed = known.changed();
        tokio::select! {
            // Without functions `followed` ends at once.
            () = async { followed.await; std::future::pending().await } => {}
            changed = changed => {
                if changed.is_err() {
                    // The sender lives as long as the command.
                    std::future::pending().await
                }
            }
        }
    }
}

/// Prints one log. A log that ends early is requested again.
async fn follow_one(session: &Session, path: String) {
    loop {
        if let Err(error) = logs::copy(session, &path).await {
            output::note(format_args!("logs: {}", failure::text(&session.explain(error))));
        }
        sleep(LOG_PAUSE).await;
    }
}

/// Waits until writes have stopped.
async fn settle(saves: &mut mpsc::Receiver<()>) {
    let latest = Instant::now() + QUIET_MAX;
    while Instant::now() < latest && timeout(QUIET, saves.recv()).await.is_ok() {}
}

/// Reports changes below a directory, except for products of builds.
fn watcher(mut watched: Watched, saved: mpsc::Sender<()>) -> anyhow::Result<notify::RecommendedWatcher> {
    let directory = watched.folder.clone();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let matters = match event {
            Ok(event) => {
                !matches!(event.kind, EventKind::Access(_))
                    && event.paths.iter().any(|path| watched.is_source(path))
            }
            // Events were lost, so something may have changed.
            Err(_) => true,
        };
        if matters {
            // The channel is full: the pending build includes this change.
            let _ = saved.try_send(());
        }
    })
    .context("cannot watch files")?;
    watcher.watch(&directory, RecursiveMode::Recursive).map_err(|error| {
        Failure::error(
            ErrorCode::FileError,
            format!("cannot watch {}: {error}", directory.display()),
            "too many watched files? raise fs.inotify.max_user_watches",
        )
    })?;
    Ok(watcher)
}

/// Whether a change of this path requires a build.
fn is_source(root: &Path, path: &Path) -> bool {
    let Ok(inner) = path.strip_prefix(root) else { return false };
    let mut parts = inner.components().map(|part| part.as_os_str().to_string_lossy());
    let is_product = parts.any(|part| {
        part == "target" || part == "node_modules" || part == "__pycache__" || part.starts_with('.')
    });
    let name = inner.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    // Cargo and npm write their lock files during a build; editors write backups.
    let is_noise = matches!(&*name, "Cargo.lock" | "package-lock.json")
        || name.ends_with('~')
        || name.ends_with(".wasm")
        || name == "4913";
    !is_product && !is_noise && !inner.as_os_str().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_noise_are_no_sources() {
        let root = Path::new("/p");
        for (path, expected) in [
            ("/p/src/lib.rs", true),
            ("/p/Cargo.toml", true),
            ("/p/assets/page.html", true),
            ("/p/target/debug/x.rs", false),
            ("/p/.git/HEAD", false),
            ("/p/.mayfly/sdk/lib.rs", false),
            ("/p/src/.lib.rs.swp", false),
            ("/p/src/lib.rs~", false),
            ("/p/Cargo.lock", false),
            ("/p/hello.wasm", false),
            ("/p", false),
            ("/elsewhere/src/lib.rs", false),
        ] {
            assert_eq!(is_source(root, Path::new(path)), expected, "{path}");
        }
    }

    #[tokio::test]
    async fn a_save_is_heard_and_settles() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("target")).unwrap();
        let (saved, mut saves) = mpsc::channel(1);
        let watched = Watched { folder: root.clone(), app: None, is_building: Arc::default() };
        let _watcher = watcher(watched, saved).unwrap();
        std::fs::write(root.join("target/x"), "1").unwrap();
        std::fs::write(root.join("lib.rs"), "1").unwrap();
        timeout(Duration::from_secs(10), saves.recv()).await.unwrap().unwrap();
        settle(&mut saves).await;
        std::fs::write(root.join("lib.rs"), "2").unwrap();
        timeout(Duration::from_secs(10), saves.recv()).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_save_cancels_a_running_build() {
        let (saved, mut saves) = mpsc::channel(1);
        let limits = BuildLimits::default();
        let running = limits.clone();
        // Ends only when it is cancelled.
        let build = tokio::task::spawn_blocking(move || {
            while !running.is_cancelled() {
                std::thread::yield_now();
            }
            anyhow::Ok(())
        });
        saved.try_send(()).unwrap();
        assert_eq!(unless_saved(build, &limits, &mut saves).await.unwrap(), None);
        let build = tokio::task::spawn_blocking(|| anyhow::Ok(1));
        assert_eq!(unless_saved(build, &limits, &mut saves).await.unwrap(), Some(1));
    }

    /// Changes are reported in order, and a removal once: the earlier reports were about the build's product.
    #[tokio::test]
    async fn a_product_is_no_news() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("target")).unwrap();
        std::fs::write(root.join("one.rs"), "").unwrap();
        std::fs::write(root.join("two.rs"), "").unwrap();
        let (saved, mut saves) = mpsc::channel(64);
        let watched = Watched { folder: root.clone(), app: None, is_building: Arc::default() };
        let _watcher = watcher(watched, saved).unwrap();
        for content in ["1", "2", "3"] {
            std::fs::write(root.join("target/x"), content).unwrap();
        }
        for source in ["one.rs", "two.rs"] {
            std::fs::remove_file(root.join(source)).unwrap();
            timeout(Duration::from_secs(10), saves.recv()).await.unwrap().unwrap();
        }
        assert!(saves.try_recv().is_err(), "the product was told too");
    }
}
