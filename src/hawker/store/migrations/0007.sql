-- The worker's database, version 7: an index that has only some rows is used where its very condition is asked for, and
-- "instance > ''" is a range of it, too, so that SQLite searches it instead of reading every machine.

drop index machine_instance;
create index machine_instance on machine (instance) where instance > '';
