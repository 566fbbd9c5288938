//! The files that `flexcomm plan` reads. Errors name file, line and value.

use super::GainRow;
use anyhow::{Context, Result, bail, ensure};
use flexcomm_domain::{CompressionRatio, Gain, Link, LinkMatrix, Seconds};
use std::path::Path;

/// Largest file that is read: a matrix of 4096 workers at 20 characters per cell has 336 MB; what people write
/// by hand or script is far smaller.
const MAX_BYTES: u64 = 64 << 20;

/// Most workers of a links file.
const MAX_RANKS: usize = 4096;

fn read(path: &Path) -> Result<String> {
    let what = || format!("failed to read {}", path.display());
    let size = std::fs::metadata(path).with_context(what)?.len();
    ensure!(size <= MAX_BYTES, "failed to read {}: it has {size} bytes, at most {MAX_BYTES} are read", path.display());
    let text = std::fs::read_to_string(path).with_context(what)?;
    Ok(text.trim_start_matches('\u{feff}').to_owned())
}

/// Lines with content, numbered from 1.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(i, line)| (i + 1, line.trim()));
    numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

pub(super) fn gains(path: &Path) -> Result<Vec<GainRow>> {
    parse_gains(&read(path)?).with_context(|| format!("failed to read {}", path.display()))
}

pub(super) fn parse_gains(text: &str) -> Result<Vec<GainRow>> {
    let mut lines = lines(text);
    let (number, header) = lines.next().context("it is empty; expected a header line cr,gain[,t_comp_s]")?;
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let timed = match columns[..] {
        ["cr", "gain"] => false,
        ["cr", "gain", "t_comp_s"] => true,
        _ => bail!("line {number}: header is {header:?}, expected cr,gain or cr,gain,t_comp_s"),
    };
    let rows: Result<Vec<GainRow>> =
        lines.map(|(n, line)| gain_row(line, timed).with_context(|| format!("line {n}"))).collect();
    let rows = rows?;
    ensure!(!rows.is_empty(), "it has a header but no ratios");
    let most = flexcomm_optimizer::profile::MAX_POINTS;
    ensure!(rows.len() <= most, "it has {} ratios, at most {most} are used", rows.len());
    Ok(rows)
}

fn gain_row(line: &str, timed: bool) -> Result<GainRow> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let expected = if timed { 3 } else { 2 };
    ensure!(cells.len() == expected, "{line:?} has {} cells, expected {expected}", cells.len());
    let number =
        |what: &str, cell: &str| cell.parse::<f64>().ok().with_context(|| format!("{what} {cell:?} is not a number"));
    let t_comp_s = match cells.get(2) {
        None | Some(&"") => None,
        Some(cell) => Some(Seconds::new(number("t_comp_s", cell)?).context("t_comp_s")?.get()),
    };
    Ok(GainRow {
        cr: CompressionRatio::new(number("cr", cells[0])?)?,
        gain: Gain::new(number("gain", cells[1])?)?,
        t_comp_s,
    })
}

pub(super) fn links(path: &Path) -> Result<LinkMatrix> {
    parse_links(&read(path)?).with_context(|| format!("failed to read {}", path.display()))
}

pub(super) fn parse_links(text: &str) -> Result<LinkMatrix> {
    let rows: Vec<(usize, Vec<&str>)> =
        lines(text).map(|(number, line)| (number, line.split(',').map(str::trim).collect())).collect();
    let n = rows.len();
    ensure!(n >= 1, "it is empty; expected N lines of N cells like 1ms/10gbit");
    ensure!(n <= MAX_RANKS, "it has {n} lines, at most {MAX_RANKS} workers are allowed");
    let mut cells = Vec::with_capacity(n * n);
    for (i, (number, row)) in rows.iter().enumerate() {
        ensure!(row.len() == n, "line {number}: it has {} cells, expected {n}, one per line of the file", row.len());
        for (j, cell) in row.iter().enumerate() {
            let link = if i == j { Ok(None) } else { link(cell).map(Some) };
            cells.push(link.with_context(|| format!("line {number}, cell {}: {cell:?}", j + 1))?);
        }
    }
    // The diagonal is not used; any valid link fills it.
    let filler = cells.iter().copied().flatten().next().map_or_else(|| Link::new(0.0, 1e9), Ok)?;
    Ok(LinkMatrix::from_fn(n, |i, j| cells[i * n + j].unwrap_or(filler))?)
}

fn link(cell: &str) -> Result<Link> {
    let (alpha, bandwidth) = cell.split_once('/').context("expected LATENCY/BANDWIDTH, for example 1ms/10gbit")?;
    Ok(Link { alpha: alpha.parse()?, bandwidth: bandwidth.parse()? })
}
