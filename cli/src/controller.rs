//! `flexcomm controller`.

use crate::repeats::Repeats;
use flexcomm_controller::RawConfig;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Run the controller: it keeps the link matrix and the jobs, decides, and serves REST, metrics and a page.
///
/// Everything that must survive is in one SQLite file; the controller may be killed at any moment and
/// started again. Agents find it by its address and show the cluster's token.
///
/// Flags win over FLEXCOMM_* variables, which win over the configuration file.
#[derive(clap::Args)]
pub struct Args {
    /// Configuration file (TOML). `--print-config` prints all keys with their defaults.
    #[arg(long, env = "FLEXCOMM_CONTROLLER_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address and port of API and page [default: 127.0.0.1:7070].
    #[arg(long, env = "FLEXCOMM_LISTEN", value_name = "IP:PORT", value_parser = crate::address)]
    listen: Option<SocketAddr>,
    /// SQLite file, made when it does not exist [default: flexcomm.db].
    #[arg(long, env = "FLEXCOMM_DB", value_name = "FILE")]
    db: Option<PathBuf>,
    /// File with the cluster's token, made when it does not exist [default: flexcomm.token].
    #[arg(long, env = "FLEXCOMM_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Let PUT /api/v1/scenario order agents to shape their links. For a lab, never for a real cluster.
    #[arg(long, env = "FLEXCOMM_SCENARIO", value_parser = clap::builder::BoolishValueParser::new())]
    scenario: bool,
    /// Print the commented sample of a configuration file and stop.
    #[arg(long)]
    print_sample_config: bool,
    /// Print the configuration as it would be used, every key, as TOML, and stop.
    #[arg(long)]
    print_config: bool,
}

/// Runs `flexcomm controller`.
pub fn run(args: Args) -> anyhow::Result<()> {
    if args.print_sample_config {
        print!("{}", flexcomm_controller::config::SAMPLE);
        return Ok(());
    }
    let unread = |e: flexcomm_controller::ConfigError| {
        // No flag has a range, so that a value out of its range stands in the file.
        let e = args.config.iter().fold(e, |e, path| e.inside(path));
        anyhow::anyhow!("failed to read the configuration: {e}")
    };
    let raw = merged(&args).map_err(unread)?;
    if args.print_config {
        raw.check().map_err(unread)?;
        print!("{}", raw.to_toml()?);
        return Ok(());
    }
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    flexcomm_log::report_panics();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(flexcomm_log::stderr)
        .log_internal_errors(false)
        .event_format(Repeats::of(tracing_subscriber::fmt::format()))
        .try_init();
    let config = raw.validate().map_err(unread)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(flexcomm_controller::serve(config, stopped())).map_err(|e| anyhow::anyhow!("failed to {e}"))
}

fn merged(args: &Args) -> Result<RawConfig, flexcomm_controller::ConfigError> {
    let mut raw = args.config.as_deref().map_or_else(|| Ok(RawConfig::default()), RawConfig::read)?;
    raw.listen = args.listen.unwrap_or(raw.listen);
    raw.db = args.db.clone().unwrap_or(raw.db);
    raw.token_file = args.token_file.clone().unwrap_or(raw.token_file);
    raw.scenario |= args.scenario;
    Ok(raw)
}

/// Ready on Ctrl-C or SIGTERM.
async fn stopped() {
    let terminated = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = terminated => {}
    }
}
