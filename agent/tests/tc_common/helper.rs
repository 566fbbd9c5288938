//! What the tc tests and their helper process (`src/bin/tc_test_helper.rs`) share.

use flexcomm_agent::tc::{GuardianCommand, Shape, TcConfig};
use flexcomm_domain::{Bandwidth, Seconds};
use std::path::Path;
use std::time::Duration;

pub const ROLE: &str = "FLEXCOMM_TC_ROLE";
pub const STATE: &str = "FLEXCOMM_TC_STATE";
pub const IFACE: &str = "FLEXCOMM_TC_IFACE";
pub const NETEM: &str = "FLEXCOMM_TC_NETEM";
pub const SHAPE: &str = "FLEXCOMM_TC_SHAPE";

/// `helper` is the program of the helper process, which is its guardian too.
pub fn config(helper: &Path, state: &Path, iface: &str) -> TcConfig {
    TcConfig {
        allow: true,
        interfaces: vec![iface.into()],
        allow_default_route: false,
        lease: Duration::from_secs(10),
        state_dir: state.into(),
        controller: Some(([10, 99, 0, 2], 7070).into()),
        echo_port: 7071,
        guardian: GuardianCommand {
            program: helper.into(),
            args: Vec::new(),
            env: vec![(ROLE.into(), "guardian".into())],
        },
    }
}

pub fn shape(delay_ms: f64, jitter_ms: f64, loss: f64, mbit: f64) -> Shape {
    Shape {
        delay: Seconds::new(delay_ms * 1e-3).unwrap(),
        jitter: Seconds::new(jitter_ms * 1e-3).unwrap(),
        loss,
        rate: Bandwidth::new(mbit * 1e6).unwrap(),
    }
}
