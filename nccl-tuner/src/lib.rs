//! `libnccl-tuner-flexcomm.so`: a tuner plugin of NCCL that prefers ring or tree for the allreduces of flexcomm, as
//! the ranks agreed, in a running job.
//!
//! NCCL asks its tuner before every collective ([`boundary`], `getCollInfo`) and takes the cheapest entry of the table
//! that the tuner may change ([`table`]). What to prefer comes from the process that trains, through an exported C
//! function ([`preference`]): only that process knows at which step the ranks agreed to change, so nothing here reads
//! the agent's orders. Without a preference, and whenever anything is not as it should be, NCCL's own choice stands.

pub mod algorithm;
pub mod boundary;
pub mod communicators;
pub mod preference;
pub mod table;
