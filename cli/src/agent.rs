//! `flexcomm agent`.

use crate::repeats::Repeats;
use flexcomm_agent::{Config, Overrides, SAMPLE};
use std::io::IsTerminal;
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};

/// Arguments of `flexcomm agent`.
#[derive(clap::Args)]
#[command(after_help = "\
The agent measures the links to the other nodes, hands decisions to the training processes of
this node and keeps what they report until the controller has stored it. It goes on while the
controller is away. It shapes links only when its configuration has `allow = true` in [shaping].

Training processes find it by their environment: FLEXCOMM_SOCKET=/run/flexcomm/agent.sock
(RUN_DIR/agent.sock). SIGTERM or Ctrl-C ends it in order: links are put back, the spool is on
disk, the socket is gone.

Examples:
  flexcomm agent --controller http://10.0.0.1:7070 --token-file /etc/flexcomm/token
  flexcomm agent --print-sample-config > /etc/flexcomm/agent.toml
  flexcomm agent --config /etc/flexcomm/agent.toml --log debug")]
pub struct Args {
    /// Configuration file (TOML). Flags beat the environment, which beats the file.
    #[arg(long, env = "FLEXCOMM_AGENT_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a commented configuration with every key and its default, and end.
    #[arg(long)]
    print_sample_config: bool,
    /// Print the configuration as it would be used, without the token, as TOML, and end.
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    overrides: Overrides,
}

/// Runs `flexcomm agent`.
pub fn run(args: Args) -> anyhow::Result<()> {
    if args.print_sample_config {
        print!("{SAMPLE}");
        return Ok(());
    }
    let unread = |e: flexcomm_agent::ConfigError| anyhow::anyhow!("failed to read the configuration: {e}");
    let config = Config::load(args.config.as_deref(), args.overrides).map_err(unread)?;
    if args.print_config {
        print!("{}", config.to_toml().map_err(unread)?);
        return Ok(());
    }
    flexcomm_log::report_panics();
    tracing_subscriber::fmt()
        .with_max_level(config.log)
        .with_writer(flexcomm_log::stderr)
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(Repeats::of(tracing_subscriber::fmt::format().with_target(false)))
        .init();
    // Two: one may wait for a disk. With many, each message wakes another.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = hangup.recv() => {}
            }
        };
        flexcomm_agent::run(config, shutdown).await.map_err(|e| anyhow::anyhow!("failed to {e}"))
    })
}
