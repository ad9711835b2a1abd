-- The worker's database, version 5: what the health checks of machines that run were last.

create table health_check (id text primary key, body text not null) without rowid;
