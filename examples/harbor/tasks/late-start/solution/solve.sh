#!/bin/sh
wc -l <ticks >answer.txt
